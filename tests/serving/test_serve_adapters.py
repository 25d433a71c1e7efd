"""A server that holds adapters: they are models of its API, and an admin adds and removes them."""

import json
import os

import jax
import pytest
import serving
import tiny

import xinfer_jax as xj

ADMIN = dict(authorization="Bearer admin")
SHAPE = serving.SHAPE | dict(max_adapters=2, max_rank=4, warm_up=False)


@pytest.fixture(scope="module")
def model():
    return tiny.shallow_model()


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    """Adapters as peft saves them, below "all". One is elsewhere."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "all").mkdir()
    for seed, name in enumerate(("all/a", "all/b", "all/wide", "elsewhere")):
        rank = 8 if name == "all/wide" else 3
        adapter = xj.lora.init_adapter(model.config, jax.random.key(seed), rank, ["q", "down"])
        changed = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(9), x.shape), adapter)
        xj.lora.save_adapter(changed, model.config, root / name)
    os.symlink(root / "elsewhere", root / "all" / "link")
    (root / "all" / "large").mkdir()
    (root / "all" / "large" / "adapter_config.json").write_text(json.dumps(dict(r=1, x="y" * 10**7)))
    (root / "all" / "linked_file").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.symlink(root / "elsewhere" / name, root / "all" / "linked_file" / name)
    (root / "all" / "pipe").mkdir()
    (root / "all" / "pipe" / "adapter_config.json").write_bytes(
        (root / "all" / "a" / "adapter_config.json").read_bytes()
    )
    os.mkfifo(root / "all" / "pipe" / "adapter_model.safetensors")
    return root


def load(server, **body):
    status, text, _ = server.call("POST", "/v1/load_lora_adapter", body, **ADMIN)
    return status, text


def test_adapters_are_models_that_come_and_go(model, directory):
    shape = SHAPE | dict(adapters=dict(a=str(directory / "all" / "a")))
    how = dict(engine=xj.EngineOptions(**shape), adapter_dir=str(directory / "all"), admin_keys=(b"admin",))
    with serving.run_server(model, **how) as server:
        ask = dict(messages=[dict(role="user", content="Hello")], temperature=0, max_tokens=12)
        plain = server.ask("chat", **ask)
        adapted = server.ask("chat", model="a", logprobs=True, **ask)
        assert (plain["model"], adapted["model"]) == (server.service.settings.name, "a")
        assert plain["choices"][0]["message"] != adapted["choices"][0]["message"]
        assert server.events("chat", model="a", **ask)[0]["model"] == "a"

        assert load(server, lora_name="b", lora_path="b") == (200, "adapter 'b' is loaded")
        _, cards, _ = server.call("GET", "/v1/models")
        assert [card["id"] for card in cards["data"]] == [plain["model"], "a", "b"]
        assert {card.get("parent") for card in cards["data"][1:]} == {plain["model"]}
        assert server.call("GET", "/v1/models/b")[0] == 200
        other = server.ask("chat", model="b", **ask)
        assert load(server, lora_name="b", lora_path="a", load_inplace=True)[0] == 200
        again = server.ask("chat", model="b", logprobs=True, **ask)
        assert again["choices"] == adapted["choices"] != other["choices"]

        for body, message in (
            (dict(lora_name="b", lora_path="b"), "'b' is loaded already: give load_inplace true"),
            (dict(lora_name="c", lora_path="b"), "holds 2 adapters"),
            (dict(lora_name=plain["model"], lora_path="b"), "name of the model"),
            (dict(lora_name="", lora_path="b"), "short text"),
            (dict(lora_name="c", lora_path="b", x=1), "no field here"),
            *((dict(lora_name="c", lora_path=path), "no directory below --adapter_dir") for path in (
                "../elsewhere", "/etc", "link", "linked_file", "nothing", "", None, 5, "a\0b", "x" * 5000,
            ) if path != ""),
            (dict(lora_name="c", lora_path=""), "adapter_config.json"),
            (dict(lora_name="c", lora_path="large"), "the limit is"),
            (dict(lora_name="c", lora_path="pipe"), "not a file"),
            (dict(lora_name="b", lora_path="b", load_inplace="true"), "true or false, got 'true'"),
        ):  # fmt: skip
            status, error = load(server, **body)
            assert status == 400 and message in error["error"]["message"], (body, error)
        unload = "/v1/unload_lora_adapter"
        assert server.call("POST", unload, dict(lora_name="x"), **ADMIN)[0] == 404
        assert server.call("POST", unload, dict(lora_name="b"))[0] == 401
        assert server.call("POST", "/v1/load_lora_adapter", dict(lora_name="c", lora_path="b"))[0] == 401
        assert server.call("POST", unload, dict(lora_name="b"), **ADMIN)[0] == 200
        status, error, _ = server.call("POST", "/v1/chat/completions", dict(ask, model="b"))
        assert status == 404 and error["error"]["code"] == "model_not_found"
        message = load(server, lora_name="c", lora_path="wide")[1]["error"]["message"]
        assert "has rank 8, and max_rank is 4" in message
        status, error, _ = server.call("POST", "/v1/embeddings", dict(model="a", input="x"))
        assert status == 400 and "without an adapter" in error["error"]["message"]
        assert server.call("POST", "/tokenize", dict(model="a", prompt="x"))[0] == 200
        assert server.idle()


def test_without_a_directory_nothing_is_loaded():
    with serving.run_server() as server:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert server.call("POST", path, dict(lora_name="a", lora_path="a"), **ADMIN)[0] == 401
