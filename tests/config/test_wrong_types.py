"""Objects of other libraries and other types in place of ours: one sentence with the remedy."""

import jax
import pytest
import tiny

import xinfer_jax as xj

pytestmark = pytest.mark.oldest


class PretrainedConfig:
    """Stands in for the base class of transformers' configs."""

    __module__ = "transformers.configuration_utils"

    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return self.fields


class Qwen2Config(PretrainedConfig):
    __module__ = "transformers_modules.qwen2"  # as of code that comes with a checkpoint


class GenerationConfig(PretrainedConfig):
    __module__ = "transformers.generation.configuration_utils"


CONFIG = Qwen2Config(**tiny.CONFIG)
SAMPLED = GenerationConfig(do_sample=True, temperature=0.7, num_beams=1, stop_strings=None)
TO_SETTINGS = r"SamplingConfig\.from_hf\(config\.to_dict\(\)\)"


@pytest.fixture(scope="module")
def model():
    return xj.load_model()


def test_the_remedies_work():
    config = xj.ModelConfig.from_hf(CONFIG.to_dict())
    assert config == xj.ModelConfig.from_hf(tiny.CONFIG)
    settings = xj.SamplingConfig.from_hf(SAMPLED.to_dict())
    assert settings == xj.SamplingConfig(temperature=0.7, top_k=50)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: xj.Model(model.params, CONFIG),
        lambda model: xj.generate(model.params, CONFIG, [[1]]),
        lambda model: xj.forward(model.params, CONFIG, jax.numpy.ones((1, 2), int)),
        lambda model: xj.save_model(model.params, CONFIG, "never"),
        lambda model: xj.params.params_from_tensors(CONFIG, {}),
        lambda _: xj.init_params(CONFIG, jax.random.key(0)),
        lambda _: xj.init_cache(CONFIG, 1, 8),
        lambda _: xj.lora.init_adapter(CONFIG, jax.random.key(0), 8, ["q"]),
        lambda _: xj.params.param_names(CONFIG),
        lambda _: xj.params.shardings(CONFIG, jax.make_mesh((1,), ("model",))),
    ],
)
def test_a_config_of_transformers_is_named(model, call):
    message = (
        r"config must be a ModelConfig, .* got Qwen2Config: give ModelConfig.from_hf\(config\.to_dict\(\)\)"
    )
    with pytest.raises(xj.InputError, match=message):
        call(model)


def test_a_config_in_place_of_its_mapping():
    with pytest.raises(
        xj.InputError, match=r"got Qwen2Config: give ModelConfig.from_hf\(config\.to_dict\(\)\)"
    ):
        xj.ModelConfig.from_hf(CONFIG)
    with pytest.raises(xj.InputError, match="got 'config.json': give the dict that json.load returns"):
        xj.ModelConfig.from_hf("config.json")


def test_settings_of_transformers_are_named(model):
    with pytest.raises(xj.InputError, match=f"got GenerationConfig: give {TO_SETTINGS}"):
        xj.SamplingConfig.from_hf(SAMPLED)
    with pytest.raises(xj.InputError, match="got 0.7: give the dict that json.load returns"):
        xj.SamplingConfig.from_hf(0.7)
    for given in (SAMPLED, [xj.SamplingConfig(), SAMPLED]):
        with pytest.raises(xj.InputError, match=f"sampling must be a SamplingConfig, .*: give {TO_SETTINGS}"):
            xj.generate(model.params, model.config, [[1]], xj.GenerateOptions(sampling=given))
    with pytest.raises(xj.InputError, match=f"sampling must be a SamplingConfig, .*: give {TO_SETTINGS}"):
        xj.beam_search(model.params, model.config, [1], sampling=SAMPLED)
    for call in (
        lambda: xj.generate(model.params, model.config, [[1]], SAMPLED),
        lambda: xj.generate_text(model, "a", SAMPLED),
    ):
        with pytest.raises(
            xj.InputError, match=rf"got GenerationConfig: give GenerateOptions\(sampling={TO_SETTINGS}\)"
        ):
            call()


def test_other_types_have_a_remedy(model):
    for options, remedy in ((xj.SamplingConfig(), "sampling=settings"), (5, "max_tokens=128")):
        with pytest.raises(xj.InputError, match=rf"options must be .*: give GenerateOptions\({remedy}\)"):
            xj.generate_text(model, "a", options)
    with pytest.raises(xj.InputError, match="the model must be a directory or a hub name, got 5: give one"):
        xj.load_model(5)


def test_the_objects_of_transformers_themselves(model):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(xj.InputError, match="got GenerationConfig: give"):
        xj.generate_text(model, "a", transformers.GenerationConfig())
    with pytest.raises(xj.InputError, match="got Qwen2Config: give ModelConfig.from_hf"):
        xj.init_cache(transformers.Qwen2Config(), 1, 8)
    settings = xj.SamplingConfig.from_hf(transformers.GenerationConfig(do_sample=True, top_p=0.8).to_dict())
    assert (settings.temperature, settings.top_k, settings.top_p) == (1.0, 50, 0.8)
    config = transformers.Qwen2Config(**tiny.CONFIG).to_dict()
    assert xj.ModelConfig.from_hf(config) == xj.ModelConfig.from_hf(tiny.CONFIG)
