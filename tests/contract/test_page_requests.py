"""The requests with which the page waits for a model, without a browser."""

from pathlib import Path

from .support import checkpoint, served

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


def test_one_request_of_the_page_loads_one_of_several_models(tmp_path: Path) -> None:
    models = [checkpoint(tmp_path / name, template=TEMPLATE) for name in ("alpha", "beta")]
    preset = tmp_path / "models.toml"
    preset.write_text("".join(f"[{each.name}]\nmodel = '{each}'\n" for each in models))
    with served("--models-preset", preset) as server:
        assert server.ok("/api/generate", model="beta", stream=False)["done"] is True
        assert server.get("/props?model=beta").json["model_alias"] == "beta"
        for _ in range(5):
            server.get("/health")
    assert not [line for line in server.log if "path=/health" in line]
