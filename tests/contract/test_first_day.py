"""What a new user types first: words that are no commands, pipes, and wrong names of files."""

from pathlib import Path

import pytest

from .support import checkpoint, command, process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("list", "mlx-specdec models lists"),
        ("ps", "mlx-specdec models lists"),
        ("download", "a model of the Hub is downloaded at its first use"),
        ("pull", "a model of the Hub is downloaded at its first use"),
        ("downlaod", "a model of the Hub is downloaded at its first use"),
        ("run", "mlx-specdec chat --model NAME"),
        ("rm", "mlx-specdec models remove NAME"),
        ("Show", "mlx-specdec inspect NAME"),
        ("calibrate", "costs are learned"),
        ("quantize", "mlx-specdec convert"),
        ("mlx_lm.server", "mlx-specdec serve"),
        ("llama-server", "mlx-specdec serve"),
        ("llama-cli", "mlx-specdec chat"),
        ("translate", "mlx-specdec generate PROMPT"),
        ("sreve", "perhaps you mean serve"),
        ("Chat", "perhaps you mean chat"),
    ],
)
def test_a_word_that_looks_like_a_command_is_no_prompt(word: str, hint: str) -> None:
    prompt = f"as a prompt, write: mlx-specdec generate {word}\n"
    command(word).refuses(f"there is no command {word}: {hint}", prompt)
    command(word, "--quiet").refuses(f"there is no command {word}: {hint}", prompt)


def test_words_after_a_word_that_looks_like_a_command_belong_to_the_prompt() -> None:
    done = command("pull", "the", "door", "--quiet")
    done.refuses("there is no command pull: ", "mlx-specdec generate 'pull the door'\n")


def test_any_other_word_is_a_prompt_and_so_is_every_word_after_generate(model: Path) -> None:
    flags = ("--model", model, "-m", 2, "--quiet", "--no-cost-cache")
    listen, named = command("listen", *flags), command("generate", "listen", *flags)
    assert (listen.code, listen.out) == (0, named.out)
    assert command("generate", "list", *flags).code == command("list things", *flags).code == 0


@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
@pytest.mark.parametrize("name", ["nope.gguf", "models/nope.gguf", "nope.safetensors"])
def test_a_file_that_is_not_there_is_no_failed_download(
    flag: str, name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    pair = ("--model", model) if flag == "--draft-model" else ()
    done = command("generate", "x", *pair, flag, name)
    done.refuses(f"there is no file {name}: check the path")
    assert "Hub" not in done.err


@pytest.mark.parametrize(
    "words", [("convert", "--model"), ("inspect",), ("chat", "--model"), ("estimate", "--model")]
)
def test_other_commands_say_the_same_about_a_file_that_is_not_there(words: tuple[str, ...]) -> None:
    rest = ("--draft-model", "x") if words[0] == "estimate" else ()
    command(*words, "nope.gguf", *rest).refuses("there is no file nope.gguf: check the path")


def test_a_name_that_is_neither_here_nor_on_the_hub_is_said_to_be_neither(tmp_path: Path) -> None:
    # The library reads the address when it is imported.
    address = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = process("generate", "x", "--model", "some/model", **address)
    done.refuses("there is no directory some/model here, and the Hub cannot be reached")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"type": "object"', "json-schema is no JSON: Expecting ',' delimiter"),
        (' {"type": object}', "json-schema is no JSON: Expecting value"),
        ('"type": "object"', "there is no file"),
        (
            "schema.json",
            "there is no file schema.json: check the path; a schema itself begins with",
        ),
    ],
)
def test_a_schema_that_is_cut_is_no_name_of_a_file(text: str, part: str) -> None:
    command("generate", "x", "--json-schema", text).refuses(part)


def test_a_file_that_holds_no_grammar_is_said_to_hold_none(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('# settings\n\n[tool]\nname = "x"\n')
    done = command("generate", "x", "--grammar", file)
    done.refuses("grammar is wrong: in line 3, column 1: ", "llguidance's variant of Lark or in")
    file.write_text('start: "a"\n' * 2 + 'b: "a\n')
    command("generate", "x", "--grammar", file).refuses("in line 3, column 6: lexer error")
    command("generate", "x", "--grammar", tmp_path / "no").refuses(
        f"--grammar: there is no file {tmp_path / 'no'}: check the path"
    )


def test_a_file_is_no_directory_for_the_prompt_cache(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = command("generate", "x", "--model", model, "--prompt-cache-dir", file, "--quiet")
    done.refuses(f"--prompt-cache-dir: cannot make a directory {file}: ")
