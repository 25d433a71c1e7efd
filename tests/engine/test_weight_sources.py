"""New weights of a running engine, from a directory and as a stream of named tensors."""

import gc
import weakref

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

SHAPE = dict(rows=2, capacity=128, chunk=64, pages=8)
IDS = [5, 6, 7]
GREEDY = xj.GenerateOptions(max_tokens=4, eos_token_ids=())


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()


@pytest.fixture(scope="module")
def versions(model):
    """Parameters of versions 0, 1, 2."""
    return [jax.tree.map(lambda x, i=i: np.asarray(x) * (1 - i / 10), model.params) for i in range(3)]


@pytest.fixture(scope="module")
def engine(model):
    return xj.Engine(model, **SHAPE)


def save(path, params, config, **how):
    xj.save_model(params, config, path, **how)
    return path


def tensors_of(params, config):
    return xj.params.params_to_tensors(params, config)


def assert_equal(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_directory_a_stream_and_a_tree_are_the_same_weights(engine, model, versions, tmp_path):
    path = save(tmp_path / "one", versions[1], model.config)
    tensors = tensors_of(versions[2], model.config)
    engine.update(versions[1])
    wanted = engine.generate([IDS], GREEDY)[0]
    engine.update(versions[0])
    engine.update(str(path), version=7)
    assert_equal(engine.model.params, versions[1])
    found = engine.generate([IDS], GREEDY)[0]
    assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    assert engine.version == 7 and found.token_versions == [[7] * 4]
    engine.update((name, tensors[name]) for name in reversed(tensors))
    assert_equal(engine.model.params, versions[2])
    assert engine.version == 8
    saved = save(tmp_path / "narrow", versions[1], model.config, dtype="bfloat16", max_shard_bytes=100_000)
    engine.update(saved)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype(np.float32), versions[1])
    assert_equal(engine.model.params, rounded)
    assert jax.tree.leaves(engine.model.params)[0].dtype == np.float32


def test_a_source_that_fails_changes_nothing(engine, model, versions, tmp_path):
    engine.update(versions[0])
    own = engine.model.params
    version = engine.version
    tensors = tensors_of(versions[1], model.config)

    def broken(count: int):
        for i, pair in enumerate(tensors.items()):
            if i == count:
                raise ConnectionError("the trainer is gone")
            yield pair

    with pytest.raises(ConnectionError, match="the trainer is gone"):
        engine.update(broken(5))
    last = list(tensors)[-1]
    with pytest.raises(xj.InputError, match=f"the tensors do not fit the config: missing {last}"):
        engine.update((name, x) for name, x in tensors.items() if name != last)
    with pytest.raises(xj.InputError, match=r"embed.weight has the shape \[3, 128\], not \[1920, 128\]"):
        engine.update((name, x[:3]) for name, x in tensors.items())
    with pytest.raises(xj.InputError, match="mlp_norm is bfloat16, not float32: leave out cast=False"):
        narrow = {name: x.astype("bfloat16") if "norm" in name else x for name, x in tensors.items()}
        engine.update([(name, narrow[name]) for name in reversed(narrow)], cast=False)
    with pytest.raises(xj.InputError, match="is no directory"):
        engine.update(tmp_path / "nothing")
    deeper = tiny.shallow_model(2)
    path = save(tmp_path / "deeper", deeper.params, deeper.config)
    with pytest.raises(xj.InputError, match="num_hidden_layers is 2 there, and 1 here"):
        engine.update(path)
    shards = save(tmp_path / "cut", versions[1], model.config)
    file = shards / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(xj.InputError, match="truncated"):
        engine.update(shards)
    assert engine.model.params is own and engine.version == version
    assert len(engine.generate([IDS], GREEDY)[0].tokens[0]) == 4


def test_a_stream_is_converted_leaf_by_leaf(engine, model, versions):
    """The engine holds the last tensor, and no earlier one, when it asks for the next tensor."""
    tensors = tensors_of(versions[1], model.config)
    given: list[weakref.ref] = []
    alive = []

    def watched():
        for name, tensor in tensors.items():
            gc.collect()
            alive.append(sum(reference() is not None for reference in given))
            array = np.array(tensor)
            given.append(weakref.ref(array))
            yield name, array

    engine.update(watched())
    assert_equal(engine.model.params, versions[1])
    assert len(alive) == len(tensors) > 10 and max(alive) == 1


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_quantized_engine_quantizes_each_source_as_it_loads_a_model(method, versions, model, tmp_path):
    quantized = tiny.shallow_model(quantize=method)
    engine = xj.Engine(quantized, **SHAPE)
    path = save(tmp_path / "floats", versions[1], model.config)
    wanted = xj.load_model(path, quantize=method).params
    engine.update(path)
    assert_equal(engine.model.params, wanted)
    engine.update(versions[2])
    engine.update(tensors_of(versions[1], model.config).items())
    assert_equal(engine.model.params, wanted)
    own = save(tmp_path / "quantized", quantized.params, quantized.config)
    engine.update(own)
    assert_equal(engine.model.params, quantized.params)
    floats = xj.Engine(model, **SHAPE)
    with pytest.raises(xj.InputError, match="is quantized in the new weights, and has another form"):
        floats.update(own)


def test_several_engines_read_a_stream_once(model, versions, tmp_path):
    """Both sides of prompts and answers, on one device."""
    tensors = tensors_of(versions[1], model.config)
    with xj.Engine(model, **SHAPE, prefill_devices=[0], decode_devices=[0]) as engine:
        engine.update(iter(tensors.items()))
        for each in engine.engines:
            assert_equal(each.model.params, versions[1])
        engine.update(save(tmp_path / "two", versions[2], model.config))
        for each in engine.engines:
            assert_equal(each.model.params, versions[2])
        assert engine.version == 2
