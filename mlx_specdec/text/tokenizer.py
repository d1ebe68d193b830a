"""Tokenizers, read from the files of a checkpoint. transformers converts those that have neither a
tokenizer.json nor an encoder-decoder's sentencepiece model, and applies some chat templates."""

import contextlib
import functools
import hashlib
import json
import math
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .. import system
from ..checkpoints.disk import check_regular, read_json
from ..checkpoints.files import vocabulary_file
from ..errors import CheckpointError, first_line, is_panic
from . import chat
from .chat import Ending, Messages, Settings

Kind = Literal["encoder-decoder", "decoder-only"]
TOKENIZER_FILES = ("*token*", "*spiece*", "*.spm", "sentencepiece*", "*vocab*", "merges*")
"""Patterns of a tokenizer's files."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""The first line of a tiktoken file: a token in base 64, and its rank."""
_NO_TAG = re.compile(r"(?!)")
_LANGUAGE_TAG = re.compile(r"\A(>>[^<>\s]+<<)")
"""The tag of the target language before a source of Marian."""
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}", re.ASCII)
"""A language code of mBART or NLLB."""
READ_AS_IS = re.compile(r"PreTrainedTokenizerFast|TokenizersBackend|Qwen2Tokenizer(Fast)?")
"""Classes of transformers that encode as tokenizer.json says. Other classes rebuild it."""
_SPECIAL_NAME = re.compile(r"\b(?:bos|eos|unk|sep|pad|cls|mask)_token\b")
SENTENCE_PIECE = ("spiece.model", "sentencepiece.bpe.model", "source.spm")
M2M100, WMT21 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu",
    "en ha is ja cs ru zh de",
)
"""Languages of M2M100 (Fan et al., arXiv 2010.11125) and of WMT21's models, in order of ids."""
# Byte-level BPE (GPT-2's) writes printable bytes as themselves, the others as U+0100 and on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE}
BYTES |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Bytes by the characters of byte-level BPE."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of a single byte."""
SENTINEL = re.compile(r"<extra_id_[0-9]{1,6}>")
"""The token of a gap in a T5's prompt. The completion repeats it before the text of the gap."""
_SENTINELS = re.compile(rf" *({SENTINEL.pattern}) *")
"""A sentinel within a prompt, with the spaces around it, which are dropped."""


class Tokenizer(ABC):
    """A translation between text and token ids.

    Attributes:
        eos_token_ids: The ids that end a completion, as far as the tokenizer knows them.
        ids: The ids of tokens by their names.
        has_chat_template: Whether `apply_chat` works.
        digest: The digest of the tokenizer's files.
    """

    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    ids: Mapping[str, int]
    has_chat_template: bool = False
    legacy: bool = False
    _directory: Path

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self._directory)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, including the special tokens around it."""

    def inner(self, text: str) -> list[int]:
        """Return the token ids of a text, without the special tokens around a prompt."""
        ids, special = self.encode(text), self.special_ids
        places = [at for at, id in enumerate(ids) if id not in special]
        return ids[places[0] : places[-1] + 1] if places else []

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""

    @functools.cached_property
    def size(self) -> int:
        """The highest id + 1. A model's logits may be wider because of padding."""
        return max(self.ids.values(), default=-1) + 1

    @functools.cached_property
    def pieces(self) -> list[str | None]:
        """The token of each id below `size`, or None. The list must not be changed."""
        pieces: list[str | None] = [None] * self.size
        for piece, id in self.ids.items():
            pieces[id] = piece
        return pieces

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of single bytes."""
        return frozenset(id for piece, id in self.ids.items() if BYTE.fullmatch(piece))

    def apply_chat(
        self, prompt: str | Messages, settings: Settings = None, *, ending: Ending = "answer"
    ) -> list[int]:
        """Return the token ids of messages.

        Args:
            prompt: The messages, or the text of the only message.
            settings: Variables of the template, and "tools".
        Raises:
            CheckpointError: If there is no chat template, or if it fails.
        """
        raise CheckpointError("this model has no chat template")


def load_tokenizer(directory: Path, *, kind: Kind) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory. Raises CheckpointError."""
    for name in ("tokenizer.json", *SENTENCE_PIECE, "target.spm", "tokenizer.model"):
        check_regular(directory / name)
    named = (directory / "config.json", directory / "tokenizer_config.json")
    config, settings = (read_json(file) if file.is_file() else {} for file in named)
    if (directory / "tokenizer.json").is_file():
        is_t5 = config.get("model_type") in ("t5", "mt5", "umt5")
        return FileTokenizer(directory, settings, ends_with_eos=is_t5)
    cuts = next((name for name in SENTENCE_PIECE if (directory / name).is_file()), None)
    if kind == "encoder-decoder" and cuts is not None:
        return SentencePieceTokenizer(directory, settings, config, directory / cuts)
    kind_named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    # Without files, transformers makes an empty tokenizer, except for ByT5, which needs no files.
    if kind_named != "ByT5Tokenizer" and not vocabulary_file(directory):
        raise CheckpointError(
            f"{directory} has no tokenizer that can be read: download its vocabulary, "
            "tokenizer.json or tokenizer.model"
        )
    # CodeT5's files need not name their class.
    code_t5 = kind == "encoder-decoder" and not kind_named
    named_type = config.get("model_type"), kind_named
    made = _converted(directory, "roberta" if code_t5 else None, named_type)
    return FileTokenizer(made, read_json(made / "tokenizer_config.json"))


def _converted(directory: Path, kind: str | None, named: object) -> Path:
    """Return a directory with the tokenizer.json and the chat template of a tokenizer that lacks
    one. transformers converts it once, into the cache directory. Raises CheckpointError.

    Args:
        kind: See `read_by_transformers`.
        named: The types that config.json names."""
    key = repr((digest_of(directory), kind, named, metadata.version("transformers")))
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    place = system.cache_directory("tokenizers") / digest
    if place.is_dir():
        return place
    file = directory / "tokenizer.model"
    if file.is_file() and not _TIKTOKEN.match(file.read_bytes()):
        # If the file is damaged, transformers complains that tiktoken is missing.
        read_sentence_piece(file)
    loaded = read_by_transformers(directory, kind)
    backend = getattr(loaded, "backend_tokenizer", None) or _of_bytes(loaded)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", suffix=".partial") as work:
        made = Path(work) / place.name
        loaded.save_pretrained(made)
        backend.save(str(made / "tokenizer.json"))
        with contextlib.suppress(OSError):  # another process has just made the same
            made.rename(place)
    return place


def _of_bytes(loaded: Any) -> Any:
    """Return the tokenizer of ByT5, whose ids are bytes + 3. transformers has it as code alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    added = [token for _, token in sorted(loaded.added_tokens_decoder.items())]
    ids = {token.content: id for id, token in enumerate(added[:3])}
    tokenizer = Tokenizer(models.BPE({**ids, **{c: b + 3 for c, b in BYTES.items()}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Bytes that are no character are left out, as transformers does.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    tokenizer.add_special_tokens(added)
    end = loaded.eos_token, loaded.eos_token_id
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
    return tokenizer


@contextlib.contextmanager
def _refusing(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise CheckpointError for exceptions of these kinds, and if the Rust library panics, which
    also writes to stderr. what: The beginning of the message."""
    try:
        yield
    except BaseException as problem:
        if not (isinstance(problem, kinds) or is_panic(problem)):
            raise
        raise CheckpointError(f"{what}: {first_line(problem)}") from None


def digest_of(directory: Path) -> str:
    """Return the digest of the tokenizer's files in a directory."""
    hashed = hashlib.blake2b(digest_size=16)
    found = {file for pattern in TOKENIZER_FILES for file in directory.glob(pattern)}
    for file in sorted(filter(Path.is_file, found)):
        content = hashlib.blake2b(file.read_bytes()).digest()
        hashed.update(file.name.encode() + b"\0" + content)
    return hashed.hexdigest()


def read_by_transformers(directory: Path, kind: str | None = None) -> Any:
    """Return the tokenizer of transformers, with the chat template. kind: The tokenizer's type in
    transformers, or None for the type that the files name. Raises CheckpointError."""
    from transformers import AutoTokenizer

    # The type of the exception depends on the damaged file.
    with _refusing(f"{directory} has no tokenizer that can be read", Exception):
        loaded = AutoTokenizer.from_pretrained(
            directory, tokenizer_type=kind, local_files_only=True, trust_remote_code=False
        )
    if loaded.chat_template is None:
        loaded.chat_template = template_of(directory, {})
    return loaded


def read_sentence_piece(file: Path) -> Any:
    """Read a sentencepiece model. Raises CheckpointError for a damaged file."""
    import sentencepiece

    with _refusing(f"{file} is damaged", RuntimeError, OSError):
        return sentencepiece.SentencePieceProcessor(model_file=str(file))


def template_of(directory: Path, settings: Mapping[str, Any]) -> Any:
    """Return the default chat template, or None. It may be a list, which only transformers reads.
    Raises CheckpointError. settings: The content of tokenizer_config.json."""
    file, older = directory / "chat_template.jinja", directory / "chat_template.json"
    if file.is_file():
        return system.read_text(file, CheckpointError)
    written = read_json(older).get("chat_template") if older.is_file() else None
    return settings.get("chat_template") or written


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library. ends_with_eos: Whether prompts end with EOS."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, ends_with_eos: bool = False
    ) -> None:
        from tokenizers import Tokenizer as Loaded

        self._directory, self._settings = directory, settings
        file = directory / "tokenizer.json"
        with _refusing(f"{file} is damaged", Exception):
            self._tokenizer = Loaded.from_str(file.read_text(encoding="utf-8"))
        fails = f"the tokenizer of {directory} fails on this text, download tokenizer.json again"
        self._reading = functools.partial(_refusing, fails)
        self.legacy = settings.get("legacy_behaviour") is True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, Mapping) else eos
        end = self._tokenizer.token_to_id(eos if eos and isinstance(eos, str) else "</s>")
        self.eos_token_ids = () if end is None else (end,)
        self._closing = self.eos_token_ids if ends_with_eos else ()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._template = template_of(directory, settings)
        self.has_chat_template = self._template is not None

    @functools.cached_property
    def templated(self) -> Any:
        return read_by_transformers(self._directory)

    def encode(self, text: str) -> list[int]:
        with self._reading():
            # Unlike `encode`, this lets other threads run meanwhile.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            ids: list[int] = encoding.ids
        return ids if ids and ids[-1:] == [*self._closing] else [*ids, *self._closing]

    def apply_chat(
        self, prompt: str | Messages, settings: Settings = None, *, ending: Ending = "answer"
    ) -> list[int]:
        sent = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        try:
            with self._reading():
                source, special, encode = self._chat((settings or {}).get("tools") is not None)
                # Copies, since objects may have methods that the sandbox does not know.
                messages, named = json.loads(json.dumps([sent, settings or {}], default=str))
                variables = {"tools": None, "documents": None, **special, **named}
                return list(encode(chat.render(source, messages, variables, ending)))
        except CheckpointError:
            raise
        except Exception as problem:
            raise CheckpointError(
                f"the chat template cannot be applied ({first_line(problem):.170}): use "
                "--no-chat-template"
            ) from None

    def _chat(self, tools: bool) -> tuple[str, Mapping[str, Any], Callable[[str], Sequence[int]]]:
        """Return the chat template for chats with or without tools, the special tokens that it may
        name, and a function that encodes its output."""
        directory, settings, template = self._directory, self._settings, self._template
        wanted = {name: settings.get(name) for name in _SPECIAL_NAME.findall(str(template))}
        texts = {n: t.get("content") if isinstance(t, Mapping) else t for n, t in wanted.items()}
        complete = all(isinstance(text, str) for text in (template, *texts.values()))
        older = (directory / "special_tokens_map.json").is_file()
        complete &= "added_tokens_decoder" in settings or not older
        complete &= not (directory / "additional_chat_templates").is_dir()
        if not complete or not READ_AS_IS.fullmatch(str(settings.get("tokenizer_class"))):
            # transformers finds what is missing here.
            loaded = self.templated
            template = loaded.get_chat_template(tools=[] if tools else None)
            encode = functools.partial(loaded.encode, add_special_tokens=False)
            return template, loaded.special_tokens_map, encode
        cut = functools.partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        return str(template), texts, lambda text: cut([text])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        with self._reading():
            # Unlike `decode`, this lets other threads run meanwhile.
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]


class SentencePieceTokenizer(Tokenizer):
    """Sentencepiece models of T5, M2M100, mBART, NLLB, Pegasus and Marian, with the tokens that
    each family adds to them. Marian has a model for each language. Special tokens in a text are
    encoded as text, except for T5's sentinels and the tag at the beginning of a source of Marian.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any], file: Path
    ) -> None:
        self._directory, self._tag = directory, _NO_TAG
        self.legacy = settings.get("legacy_behaviour") is True
        self._source = self._target = read_sentence_piece(file)
        names = [self._source.id_to_piece(id) for id in range(self._source.get_piece_size())]
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        ordered: list[str] = []
        if file.name == "source.spm":
            self._target, self._tag = read_sentence_piece(directory / "target.spm"), _LANGUAGE_TAG
            self._ids = _vocabulary(directory / "vocab.json")
        elif file.name == "spiece.model" and config.get("model_type") == "pegasus":
            # Between special tokens and pieces, Pegasus has ids for pretraining.
            more = [f"<unk_{number}>" for number in range(2, settings.get("offset", 103))]
            special = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *more, "<unk>"]
            ordered = [*special[:-1], *names[2:]]
        elif file.name == "spiece.model":
            # By default 100 sentinels follow the pieces, and <extra_id_0> is the last one. mT5 has
            # sentinels among the pieces, and MADLAD-400's pieces are its complete vocabulary.
            full = "<extra_id_" in names[-1] or len(names) >= config.get("vocab_size", math.inf)
            extra = settings.get("extra_ids", 0 if full else 100)
            sentinels = [f"<extra_id_{number}>" for number in reversed(range(extra))]
            controls = [name for id, name in enumerate(names) if self._source.is_control(id)]
            special, ordered = [*controls, *sentinels], [*names, *sentinels]
            self._tag = _SENTINELS
        elif (directory / "vocab.json").is_file():
            listed = WMT21 if settings.get("language_codes") == "wmt21" else M2M100
            vocabulary = _vocabulary(directory / "vocab.json")
            tags = [f"__{code}__" for code in listed.split()]
            special += tags
            self._ids = vocabulary | {tag: id for id, tag in enumerate(tags, len(vocabulary))}
        else:
            # The order of fairseq begins with special tokens and ends with languages.
            named = directory / "special_tokens_map.json"
            both = settings, read_json(named) if named.is_file() else {}
            keys = ("additional_special_tokens", "extra_special_tokens")
            lists = [file[key] for file in both for key in keys if isinstance(file.get(key), list)]
            longest = map(str, max(lists, key=len, default=[]))
            last = [*(code for code in longest if LANGUAGE.fullmatch(code)), "<mask>"]
            ordered = [*special, *names[3:], *last]
            special += last
        if ordered:
            self._ids = {name: id for id, name in enumerate(ordered)}
        target = directory / "target_vocab.json"
        self.ids = written = _vocabulary(target) if target.is_file() else self._ids
        self.special_ids = frozenset(written[name] for name in special if name in written)
        if not {"</s>", "<unk>"} <= self._ids.keys() & written.keys():
            raise CheckpointError(f"{directory} has a vocabulary without </s> and <unk>")
        self.eos_token_ids = (written["</s>"],)

    def encode(self, text: str) -> list[int]:
        pieces: list[str] = []
        # Every second part is a tag.
        for number, part in enumerate(self._tag.split(text)):
            known = self._tag is _LANGUAGE_TAG or self._ids.get(part) in self.special_ids
            is_token = number % 2 and known
            pieces += [part] if is_token else self._source.encode(part, out_type=str)
        unknown = self._ids["<unk>"]
        return [self._ids.get(piece, unknown) for piece in [*pieces, "</s>"]]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (self.pieces[id] for id in ids if id not in self.special_ids)
        text: str = self._target.decode_pieces([piece for piece in pieces if piece])
        # Pieces of the source language are not in the target's model, which leaves their spaces.
        return text.replace("\u2581", " ")


def _vocabulary(file: Path) -> dict[str, int]:
    """Read the ids of pieces from a file. Raises CheckpointError."""
    ids = read_json(file)
    most = 2 * len(ids)
    if not ids or not all(type(id) is int and 0 <= id < most for id in ids.values()):
        raise CheckpointError(f"{file} is no vocabulary: it must give each piece an id")
    return ids
