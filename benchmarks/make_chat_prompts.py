"""Make chat prompts that are free to use, for the training of a drafter: tasks about topics, both
written for this project, and user turns that the model itself writes. None of them is in
prompts/chat.jsonl, which is for measuring.

    python benchmarks/make_chat_prompts.py --model MODEL --own 1500 > chat.jsonl"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from mlx_specdec import Options, Request, generate_many, load
from mlx_specdec.engine.pair import Pair

HELD_OUT = Path(__file__).parents[1] / "prompts" / "chat.jsonl"
TASKS = """Explain {} in simple words.
What is {}?
How does {} work?
Why is {} important?
Write a short story about {}.
Write a poem about {}.
Give me five tips about {}.
What are the advantages and disadvantages of {}?
Write a short paragraph about {}.
I want to learn more about {}. Where should I start?
Can you tell me something interesting about {}?
Describe {} to a ten-year-old child.
Write an email to a friend about {}.
What are the most common mistakes people make with {}?
Make a list of questions that I could ask about {}.
Summarize what you know about {} in three sentences.
What is the history of {}?
How has {} changed over the last hundred years?
Write a dialogue between two friends about {}.
Give an example of {} in everyday life.
Plan a one-week project about {}.
Write a news headline and a first paragraph about {}.
What would a world without {} look like?
Is {} good or bad for children?
Help me prepare a short talk about {}.
I am worried about {}. What can I do?
Compare {} with something similar.
Write step-by-step instructions for {}.
What tools or materials do I need for {}?
Write a funny advertisement for {}."""
TOPICS = """photosynthesis|gravity|the human heart|electric cars|solar power|the French Revolution
chess|knitting|baking a cake|camping|public libraries|the Roman Empire|earthquakes|volcanoes
climate change|recycling|budgeting|credit cards|renting a flat|gardening|bird watching|photography
playing the guitar|learning the piano|swimming|yoga|healthy eating|cooking pasta|making coffee|tea
time management|remote work|team meetings|job applications|public speaking|negotiation|friendship
first aid|the immune system|stress|meditation|a cold|allergies|exercise at home|walking|dental care
computers|the Internet|passwords|spam|search engines|artificial intelligence|robots|video games
smartphones|social media|online shopping|data privacy|electricity|magnets|light|sound|the moon
the solar system|stars|the ocean|rivers|deserts|rainforests|polar bears|elephants|whales|ants
horses|parrots|dogs|butterflies|spiders|dinosaurs|trees|mushrooms|roses|potatoes|chocolate|cheese
democracy|elections|taxes|the police|the United Nations|human rights|trade|money|banks|insurance
the Middle Ages|ancient Egypt|the Silk Road|the printing press|the steam engine|airplanes|trains
ships|bridges|skyscrapers|bicycles|traffic|maps|museums|theaters|films|novels|poetry|comics|jazz
classical music|dancing|painting|sculpture|architecture|fashion|languages|grammar|spelling|idioms
dreams|memory|curiosity|courage|kindness|honesty|patience|loneliness|teamwork|leadership|creativity
fractions|percentages|probability|triangles|prime numbers|statistics|algebra|logic puzzles|magic
holidays by the sea|winter sports|football|tennis|the Olympic Games|festivals|birthdays|weddings
moving house|cleaning the kitchen|repairing a chair|painting a wall|saving water|a power failure"""
CODE = """Write a Python function that {}.
How can I write a program that {}?
Write a JavaScript function that {}.
Show me an example of code that {}, with comments.
Explain step by step how to write code that {}."""
DUTIES = """adds two numbers|reverses a string|finds the smallest number in a list|sorts a list
reads a text file line by line|converts Celsius to Fahrenheit|checks whether a year is a leap year
prints the first ten Fibonacci numbers|sorts a list of names|counts the words of a text
computes the average of a list|finds prime numbers below one hundred|draws a triangle of stars
merges two dictionaries|splits a string at commas|writes data to a file|generates a random password
checks whether a number is even|finds the longest word in a sentence|rolls two dice
computes the area of a circle|replaces all spaces by dashes|multiplies two matrices
parses a date|asks the user for a name and greets her|finds the most frequent letter
counts down from ten|validates an email address|flattens a nested list|searches a sorted list"""
SUMS = (
    "What is {} plus {}?",
    "What is {} times {}?",
    "A shop sells {} apples on Monday and {} on Tuesday. How many apples does it sell in total?",
    "Tom has {} marbles and gives away half of them. Mia has {}. Who has more?",
    "A car drives {} kilometers each day for {} days. How far does it drive?",
    "If one book costs {} dollars, how much do {} books cost?",
)


POLITE = ("Please {}", "{}, please", "Hello! Please {}", "I need your help: {}")
VERBS = ("Compare", "Describe", "Explain", "Give", "Make", "Plan", "Show", "Summarize", "Write")
SHARE = 0.8
"""Share of the tasks that begin with a verb and are also asked politely."""


def written(draw: random.Random, sums: int = 120) -> Iterator[str]:
    """Yield every task about every topic, every duty of a program, and some sums."""
    for tasks, topics in ((TASKS, TOPICS), (CODE, DUTIES)):
        for topic in topics.replace("\n", "|").split("|"):
            for task in tasks.splitlines():
                yield task.format(topic)
                if task.startswith(VERBS) and draw.random() < SHARE:
                    asked = draw.choice(POLITE).format(task[0].lower() + task[1:].rstrip("."))
                    yield asked[0].upper() + asked[1:].format(topic) + "."
    for _ in range(sums):
        yield draw.choice(SUMS).format(draw.randint(2, 99), draw.randint(2, 30))


def own(pair: Pair, count: int, seed: int, at_once: int = 96) -> Iterator[str]:
    """Yield user turns that the model writes after the header of the user's turn (Xu et al., arXiv
    2406.08464)."""
    mark = "A MARK"
    chat = pair.tokenizer.decode(pair.tokenizer.apply_chat(mark))
    header = tuple(pair.tokenizer.encode(chat[: chat.index(mark)]))
    seen = 0
    while seen < count:
        seeds = range(seed, seed := seed + at_once)
        sampling = {"max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "regular": True}
        requests = [Request(header, Options(seed=one, **sampling)) for one in seeds]
        for result in generate_many(pair, requests, Options(regular=True), batch_size=at_once):
            if result.finish_reason == "eos" and len(result.tokens) > 3:
                seen += 1
                yield result.text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the model that writes user turns")
    parser.add_argument("--own", type=int, default=1500, help="how many it writes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    texts = [*written(draw)]
    if args.model:
        texts += own(load(args.model), args.own, args.seed)
    held_out = {json.loads(line)["prompt"] for line in HELD_OUT.read_text("utf-8").splitlines()}
    texts = sorted({text for text in texts if text} - held_out)
    draw.shuffle(texts)
    sys.stdout.writelines(json.dumps({"prompt": text}) + "\n" for text in texts)


if __name__ == "__main__":
    main()
