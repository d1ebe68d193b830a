"""What a new user types first: words that are no commands, pipes, and wrong names of files."""

from pathlib import Path

import pytest

from .support import checkpoint, command


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
    flags = ("--model", model, "-m", 2, "--quiet", "--no-cache")
    listen, named = command("listen", *flags), command("generate", "listen", *flags)
    assert (listen.code, listen.out) == (0, named.out)
    assert command("generate", "list", *flags).code == command("list things", *flags).code == 0
