"""Sentences with lists of things, written for this project: sentence collections have few of them,
and a small model that has not seen lists drops and repeats their members."""

import random

# English, French noun, gender and number (m, f, or p for plural).
THINGS = """
eggs=œufs p|bread=pain m|milk=lait m|cheese=fromage m|butter=beurre m|rice=riz m|wine=vin m
water=eau f|salt=sel m|sugar=sucre m|coffee=café m|tea=thé m|meat=viande f|fish=poisson m
fruit=fruits p|vegetables=légumes p|apples=pommes p|oranges=oranges p|bananas=bananes p
pears=poires p|lemons=citrons p|strawberries=fraises p|grapes=raisins p|cherries=cerises p
peaches=pêches p|avocados=avocats p|avocadoes=avocats p|tomatoes=tomates p
potatoes=pommes de terre p|carrots=carottes p|onions=oignons p|mushrooms=champignons p
beans=haricots p|peas=petits pois p|garlic=ail m|lettuce=laitue f|soup=soupe f|chicken=poulet m
beef=bœuf m|ham=jambon m|pasta=pâtes p|noodles=nouilles p|flour=farine f|oil=huile f|honey=miel m
jam=confiture f|chocolate=chocolat m|cookies=biscuits p|cakes=gâteaux p|ice cream=glace f
juice=jus m|beer=bière f|nuts=noix p|yogurt=yaourt m|cream=crème f|pepper=poivre m|soap=savon m
paper=papier m|flowers=fleurs p|books=livres p|pens=stylos p|pencils=crayons p|notebooks=cahiers p
newspapers=journaux p|magazines=magazines p|letters=lettres p|stamps=timbres p|shoes=chaussures p
socks=chaussettes p|shirts=chemises p|hats=chapeaux p|gloves=gants p|coats=manteaux p
dresses=robes p|toys=jouets p|clothes=vêtements p|chairs=chaises p|tables=tables p|lamps=lampes p
plates=assiettes p|glasses=verres p|knives=couteaux p|forks=fourchettes p|spoons=cuillères p
bottles=bouteilles p|dogs=chiens p|cats=chats p|horses=chevaux p|birds=oiseaux p|cows=vaches p
sheep=moutons p|rabbits=lapins p|trees=arbres p|cars=voitures p|bicycles=vélos p|boats=bateaux p
trains=trains p|music=musique f|money=argent m|furniture=meubles p|tools=outils p
medicine=médicaments p|wood=bois m|gold=or m|silver=argent m|gifts=cadeaux p|games=jeux p
tickets=billets p|maps=cartes p
"""

# The French slot says which article each member takes: {some}, {the} or {of}.
FRAMES = """
I bought {list}.=J'ai acheté {some}.
We bought {list}.=Nous avons acheté {some}.
She bought {list} at the store.=Elle a acheté {some} au magasin.
He bought {list} at the supermarket.=Il a acheté {some} au supermarché.
Tom bought {list} yesterday.=Tom a acheté {some} hier.
I want to buy {list}.=Je veux acheter {some}.
I have to buy {list}.=Je dois acheter {some}.
You should buy {list}.=Tu devrais acheter {some}.
Let's buy {list}.=Achetons {some}.
Let's go buy {list}.=Allons acheter {some}.
Let's go to the market and buy {list}.=Allons au marché et achetons {some}.
Let's go to the supermarket and get {list}.=Allons au supermarché prendre {some}.
Let's go to the store and look for {list}.=Allons au magasin chercher {some}.
Could you go to the store and buy {list}?=Pourrais-tu aller au magasin acheter {some} ?
I went to the store and bought {list}.=Je suis allé au magasin et j'ai acheté {some}.
She went to the market to buy {list}.=Elle est allée au marché pour acheter {some}.
They went to the store and bought {list}.=Ils sont allés au magasin et ont acheté {some}.
I went shopping and bought {list}.=Je suis allé faire des courses et j'ai acheté {some}.
Please bring {list}.=Apportez {some}, s'il vous plaît.
Don't forget to bring {list}.=N'oublie pas d'apporter {some}.
Mary brought {list}.=Marie a apporté {some}.
There were {list} on the table.=Il y avait {some} sur la table.
We saw {list}.=Nous avons vu {some}.
Do you have {list}?=Avez-vous {some} ?
They sell {list}.=Ils vendent {some}.
This store sells {list}.=Ce magasin vend {some}.
Tom gave Mary {list}.=Tom a donné {some} à Marie.
I received {list} for my birthday.=J'ai reçu {some} pour mon anniversaire.
I found {list} in the kitchen.=J'ai trouvé {some} dans la cuisine.
In the box there were {list}.=Dans la boîte, il y avait {some}.
I like {list}.=J'aime {the}.
Tom likes {list}.=Tom aime {the}.
My sister loves {list}.=Ma sœur adore {the}.
I don't like {list}.=Je n'aime pas {the}.
He prefers {list}.=Il préfère {the}.
Children like {list}.=Les enfants aiment {the}.
Where are {list}?=Où sont {the} ?
Put {list} on the table.=Mets {the} sur la table.
He sold {list}.=Il a vendu {the}.
They lost {list}.=Ils ont perdu {the}.
We need {list}.=Nous avons besoin {of}.
I need {list}.=J'ai besoin {of}.
Do you need {list}?=Avez-vous besoin {of} ?
We need {list} for the party.=Nous avons besoin {of} pour la fête.
They talked about {list}.=Ils ont parlé {of}.
The box is full of {list}.=La boîte est pleine {of}.
He bought many things, including {list}.=Il a acheté beaucoup de choses, dont {some}.
She sells many things, including {list}.=Elle vend beaucoup de choses, y compris {some}.
We bought some food, including {list}.=Nous avons acheté de la nourriture, dont {some}.
I bought some groceries, including {list}.=J'ai acheté des provisions, dont {some}.
Let's buy some groceries including {list}.=Achetons des provisions, dont {some}.
She bought some groceries including {list}.=Elle a acheté des provisions, dont {some}.
Tom needs to buy some groceries, including {list}.=Tom doit acheter des provisions, dont {some}.
I need some things from the store, including {list}.=J'ai besoin de choses du magasin, dont {some}.
We went to the store and bought food.=Nous sommes allés au magasin et avons acheté à manger.
Let's go to the store and buy some food.=Allons au magasin et achetons de la nourriture.
Let's go to the store and buy some things.=Allons au magasin et achetons des choses.
We should buy some groceries at the store.=Nous devrions acheter des provisions au magasin.
"""

ELIDING = "aeiouâéèêîôœ"
ARTICLES = {
    "some": {"m": "du ", "f": "de la ", "p": "des ", "elided": "de l'"},
    "the": {"m": "le ", "f": "la ", "p": "les ", "elided": "l'"},
    "of": {"m": "de ", "f": "de ", "p": "de ", "elided": "d'"},
}


def _read_things() -> list[tuple[str, str, str]]:
    entries = (entry.partition("=") for entry in THINGS.replace("\n", "|").split("|") if entry)
    return [(english, *french.rsplit(" ", 1)) for english, _, french in entries]  # type: ignore[misc]


def _read_frames() -> list[tuple[str, str]]:
    lines = (line.partition("=") for line in FRAMES.strip().splitlines())
    return [(english, french) for english, _, french in lines]


NOUNS = _read_things()
SENTENCES = _read_frames()


def with_article(kind: str, noun: str, number: str) -> str:
    """The French noun with the article that the sentence wants; vowels and the mute h elide."""
    elides = noun[0] in ELIDING or noun in ("huile",)
    if elides and (number != "p" or kind == "of"):
        return ARTICLES[kind]["elided"] + noun
    return ARTICLES[kind][number] + noun


def listed(members: list[str], conjunction: str, *, serial: bool) -> str:
    """a, b and c; with a comma before the conjunction too where serial."""
    if len(members) == 1:
        return members[0]
    comma = "," if serial and len(members) > 2 else ""
    return f"{', '.join(members[:-1])}{comma} {conjunction} {members[-1]}"


def list_sentence(dice: random.Random) -> tuple[str, str]:
    """One English sentence with a list of one to five things, and its French."""
    english, french = dice.choice(SENTENCES)
    chosen = dice.sample(NOUNS, dice.choice([1, 2, 2, 3, 3, 3, 4, 5]))
    source = listed([noun for noun, _, _ in chosen], "and", serial=dice.random() < 0.7)
    slots = {
        kind: listed(
            [with_article(kind, noun, number) for _, noun, number in chosen], "et", serial=False
        )
        for kind in ARTICLES
    }
    return english.replace("{list}", source), french.format(**slots)
