"""Write what llama.cpp and transformers make of a published model into smollm2.json, gemma3.json or
qwen-coder.json.

    python -m pip install xllamacpp torch transformers accelerate gguf
    python tests/real/make_references.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

llama.cpp gives token ids and chat prompts. transformers gives greedy outputs and log-probabilities,
since it computes with the file's weights in float32; llama.cpp rounds activations to 8 bits. Run it
in an environment of its own."""

import json
import os
import sys
import unicodedata
import urllib.request
from importlib.metadata import version
from pathlib import Path

_EARLIER = json.loads(Path(__file__).with_name("smollm2.json").read_text(encoding="utf-8"))
TEXTS: list[str] = [text for text, _ in _EARLIER["texts"]]
CHATS: list[list[dict[str, str]]] = [messages for messages, _ in _EARLIER["chats"]]
QUESTIONS: list[str] = [one["question"] for one in _EARLIER["completions"]]
"""What the earlier references of SmolLM2 have: all of it, because none of its texts is left out."""
MOST_TOKENS, LIKELIEST = 40, 5
WITHOUT_CHATS = ("gemma3",)
"""Models that continue a text and have no chat template."""
WITH_NFC = ("qwen-coder",)
"""Models whose published tokenizer.json composes characters first, which llama.cpp leaves out."""
LEFT_OUT = {"qwen-coder": ["</s>"]}
"""Texts that llama.cpp reads as one token, and the published tokenizer.json does not."""


class LlamaCpp:
    """llama.cpp's server over one model, on a port of this machine."""

    def __init__(self, model: Path, *, nfc: bool) -> None:
        import xllamacpp

        self._nfc = nfc

        settings = xllamacpp.CommonParams()
        settings.model.path = str(model)
        settings.n_ctx, settings.n_gpu_layers, settings.use_jinja = 1024, 0, True
        settings.cpuparams.n_threads = 1
        self._server = xllamacpp.Server(settings)

    def _post(self, path: str, **body: object) -> dict:
        address = self._server.listening_address + path
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def ids(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self._nfc else text
        return self._post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return self.ids(self._post("/apply-template", messages=messages)["prompt"])


def completions(model: Path, prompts: dict[str, list[int]]) -> list[dict[str, object]]:
    """Greedy completions in float32, with the likeliest tokens at every position."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    made = []
    for question, prompt in prompts.items():
        ids = network.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=MOST_TOKENS, pad_token_id=0
        )
        with torch.no_grad():
            scores = torch.log_softmax(network(ids[:, :-1]).logits[0, len(prompt) - 1 :], dim=-1)
        top = [
            [[int(id), round(float(value), 4)] for value, id in zip(*row, strict=True)]
            for row in zip(*scores.topk(LIKELIEST), strict=True)
        ]
        tokens = ids[0, len(prompt) :].tolist()
        made.append({"question": question, "prompt": prompt, "tokens": tokens, "likeliest": top})
    return made


if __name__ == "__main__":
    name, model = sys.argv[1], Path(sys.argv[2]).absolute()
    llama_cpp = LlamaCpp(model, nfc=name in WITH_NFC)
    chats = [] if name in WITHOUT_CHATS else CHATS
    prompts = {
        question: llama_cpp.prompt([{"role": "user", "content": question}])
        if chats
        else llama_cpp.ids(question)
        for question in QUESTIONS
    }
    makers = ("xllamacpp", "transformers", "torch")
    origin = {
        "model": model.name,
        "made by": "tests/real/make_references.py",
        **{maker: version(maker) for maker in makers},
    }
    references = {
        "origin": origin,
        "texts": [
            [text, llama_cpp.ids(text)] for text in TEXTS if text not in LEFT_OUT.get(name, [])
        ],
        "chats": [[chat, llama_cpp.prompt(chat)] for chat in chats],
        "completions": completions(model, prompts),
    }
    file = Path(__file__).with_name(f"{name}.json")
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in references.items())
    file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the server's threads never end
