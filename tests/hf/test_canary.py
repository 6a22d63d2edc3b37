"""Every private or internal API of transformers and torch that src uses, and what is expected of it. Where a new version of one
breaks it, this file says so before anything else fails in a stranger way."""

from __future__ import annotations

import ast
import inspect
from _thread import RLock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.logits_process import LogitNormalization, LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.hub import cached_file

from skipstone.assets import NANO
from skipstone.models.packed_weight import PackedWeight
from tests.helpers import families

TRAINER = {
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "log": ["logs", "start_time"],
    "create_optimizer": ["model"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "set_initial_training_values": ["args", "dataloader"],
    "_get_output_dir": ["trial"],
    "_save_checkpoint": ["model", "trial"],
}
SOURCE = Path(__file__).parents[2] / "src" / "skipstone"


def prepared(**options: Any) -> dict[str, Any]:
    """What `model.generate` hands to a custom decoding function."""
    given: dict[str, Any] = {}

    def capture(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **model_kwargs: Any
    ) -> Any:
        given.update(
            model=model,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            config=generation_config,
            model_kwargs=model_kwargs,
        )
        return given

    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 4, **options}
    assert families.cached("llama").generate(ids, custom_generate=capture, **options) is given
    return given


def logits_processor() -> None:
    names = list(inspect.signature(LlamaForCausalLM._get_logits_processor).parameters)
    wanted = {"generation_config", "input_ids_seq_length", "encoder_input_ids", "device", "model_kwargs"}
    assert wanted <= set(names)
    built = prepared(repetition_penalty=1.2, suppress_tokens=[3])["logits_processor"]
    assert [type(one).__name__ for one in built] == ["RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor"]


def prefix_allowed_tokens_fn() -> None:
    def allowed(_: int, __: Any) -> list[int]:
        return [1]

    assert PrefixConstrainedLogitsProcessor(allowed, 1)._prefix_allowed_tokens_fn is allowed


def attention_implementation() -> None:
    config: Any = families.cached("llama").config
    assert config._attn_implementation == "sdpa"


def classes_of_types() -> None:
    """By the config's class; what was registered is in it as well."""

    class Own(LlamaConfig):
        model_type = "own"

    assert AutoModelForCausalLM._model_mapping[LlamaConfig] is LlamaForCausalLM
    assert Own not in AutoModelForCausalLM._model_mapping
    AutoModelForCausalLM.register(Own, type("OwnForCausalLM", (LlamaForCausalLM,), {"config_class": Own}))
    assert Own in AutoModelForCausalLM._model_mapping


def places_of_modules_and_parameters() -> None:
    module = torch.nn.Linear(2, 2)
    module.add_module("child", torch.nn.ReLU())
    assert module._modules == {"child": module.child}
    assert list(module._parameters) == ["weight", "bias"]
    assert vars(module)["_modules"] is module._modules
    module = torch.nn.Module()
    module.register_buffer("bias", torch.ones(1))
    assert module._buffers["bias"] is module.bias
    module.__dict__["bias"] = "before the buffer"
    assert module.bias == "before the buffer"


def places_of_hooks() -> None:
    module = torch.nn.Linear(2, 2)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1


def version_of_a_parameter() -> None:
    """It counts what was written in place, which is how a fingerprint knows that weights have changed."""
    weight = torch.nn.Linear(2, 2).weight
    before = weight._version
    with torch.no_grad():
        weight.add_(1)
    assert weight._version > before


def special_token_tensors() -> None:
    config = prepared(eos_token_id=[4, 9], pad_token_id=2, max_new_tokens=3)["config"]
    assert config._eos_token_tensor.tolist() == [4, 9]
    assert int(config._pad_token_tensor) == 2
    assert prepared(max_new_tokens=3)["config"]._eos_token_tensor is None


def training() -> None:
    """What LayerSkipTrainer overrides, and the output that its forward gives."""
    assert CausalLMOutput(loss=torch.tensor(1.0))["loss"] == 1
    for name, parameters in TRAINER.items():
        assert list(inspect.signature(getattr(transformers.Trainer, name)).parameters)[1:] == parameters


def saved_generation_config() -> None:
    """One that stems from the model's config is made anew when it is saved, which would lose a method of its own."""
    assert GenerationConfig.from_model_config(LlamaConfig())._from_model_config is True
    assert not GenerationConfig(skipstone={"method": "layerskip"})._from_model_config


def wrapper_subclasses() -> None:
    """torch's own recipe for a tensor subclass that has no storage: models/packed_weight.py."""
    made = torch.Tensor._make_wrapper_subclass(PackedWeight, (3, 2), dtype=torch.float32)
    assert made.shape == (3, 2)
    assert PackedWeight.__torch_function__ is torch._C._disabled_torch_function_impl
    assert [argument.name for argument in torch.ops.aten.mul_.Tensor._schema.arguments] == ["self", "other"]


def hooks_of_accelerate() -> None:
    """Where they are, what they know, and that weights on disk or in the CPU's memory are on the meta device between two calls.

    models/device_map.py reads all of it."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    held = {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}
    accelerate.hooks.attach_align_device_hook(module, torch.device("cpu"), offload=True, weights_map=held)
    hook: Any = module[0]._hf_hook
    assert (hook.execution_device, hook.offload, hook.weights_map["weight"].tolist()) == (
        torch.device("cpu"),
        True,
        [[1, 1]] * 2,
    )
    assert module(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert module[0].weight.is_meta
    several: Any = accelerate.hooks.add_hook_to_module(torch.nn.Linear(2, 2), accelerate.hooks.ModelHook())
    accelerate.hooks.add_hook_to_module(several, accelerate.hooks.ModelHook(), append=True)
    assert len(several._hf_hook.hooks) == 2


def place_of_a_storage() -> None:
    one = torch.zeros(3)
    assert one.untyped_storage()._cdata == one[1:].untyped_storage()._cdata
    assert one.untyped_storage()._cdata != torch.zeros(3).untyped_storage()._cdata


def default_devices() -> None:
    assert not torch._C._len_torch_function_stack()
    with torch.device("meta"):
        assert torch._C._len_torch_function_stack() == 1
    torch.set_default_device("meta")
    try:
        assert torch._C._len_torch_function_stack() == 1
    finally:
        torch.set_default_device(None)


def locks() -> None:
    lock: Any = RLock()
    assert not lock._is_owned()
    lock.acquire()
    assert lock._is_owned()
    lock._at_fork_reinit()
    assert not lock._is_owned()


PRIVATE: dict[str, Callable[[], None]] = {
    "_C": wrapper_subclasses,
    "_disabled_torch_function_impl": wrapper_subclasses,
    "_make_wrapper_subclass": wrapper_subclasses,
    "_schema": wrapper_subclasses,
    "_get_logits_processor": logits_processor,
    "_get_default_generation_params": lambda: GenerationConfig._get_default_generation_params,
    "_prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
    "_attn_implementation": attention_implementation,
    "_forward_hooks": places_of_hooks,
    "_hf_hook": hooks_of_accelerate,
    "_forward_pre_hooks": places_of_hooks,
    "_buffers": places_of_modules_and_parameters,
    "_modules": places_of_modules_and_parameters,
    "_parameters": places_of_modules_and_parameters,
    "_version": version_of_a_parameter,
    "_cdata": place_of_a_storage,
    "_len_torch_function_stack": default_devices,
    "_is_owned": locks,
    "_at_fork_reinit": locks,
    "_pad_token_tensor": special_token_tensors,
    "_eos_token_tensor": special_token_tensors,
    "_is_stateful": lambda: PreTrainedModel._is_stateful,
    "_from_config": lambda: LlamaForCausalLM._from_config,
    "_from_model_config": saved_generation_config,
    "_load_from_checkpoint": lambda: transformers.Trainer._load_from_checkpoint,
    "_model_mapping": classes_of_types,
}


def layer_types() -> None:
    types, arguments = get_layer_types_and_kwargs(families.cached("mistral").config)
    assert types == ["sliding_attention"] * 4
    assert [one["sliding_window"] for one in arguments] == [families.WINDOW] * 4
    assert get_layer_types_and_kwargs(families.cached("llama").config)[0] == ["full_attention"] * 4


def processors() -> None:
    assert isinstance(prepared()["logits_processor"], LogitsProcessorList)
    scores = torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(LogitNormalization()(torch.zeros(1, 1), scores), scores.log_softmax(-1))


def criteria() -> None:
    found = prepared(eos_token_id=[4, 9], max_new_tokens=3)["stopping_criteria"]
    assert isinstance(found, StoppingCriteriaList)
    assert [c.max_length for c in found if isinstance(c, MaxLengthCriteria)] == [6]
    assert [c.eos_token_id.tolist() for c in found if isinstance(c, EosTokenCriteria)] == [[4, 9]]


def generation_file() -> None:
    assert Path(str(cached_file(str(NANO), "generation_config.json"))).is_file()
    assert cached_file(str(NANO), "no such file", _raise_exceptions_for_missing_entries=False) is None
    assert "_raise_exceptions_for_connection_errors" in inspect.getsource(inspect.getmodule(cached_file))


INTERNAL: dict[str, Callable[[], None] | None] = {
    "transformers.cache_utils.get_layer_types_and_kwargs": layer_types,
    "transformers.distributed.configuration_utils.DistributedConfig": None,
    "transformers.activations.ACT2FN": None,
    "transformers.convert_slow_tokenizer.bytes_to_unicode": None,
    "transformers.tokenization_utils_tokenizers.TokenizersBackend": None,
    "transformers.generation.logits_process.LogitsProcessorList": processors,
    "transformers.generation.logits_process.LogitNormalization": processors,
    "transformers.generation.logits_process.PrefixConstrainedLogitsProcessor": prefix_allowed_tokens_fn,
    "transformers.generation.stopping_criteria.StoppingCriteriaList": criteria,
    "transformers.generation.stopping_criteria.EosTokenCriteria": criteria,
    "transformers.generation.stopping_criteria.MaxLengthCriteria": criteria,
    "transformers.generation.utils.GenerateDecoderOnlyOutput": None,
    "transformers.modeling_outputs.CausalLMOutput": training,
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": None,
    "transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": None,
    "transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS": None,
    "transformers.modeling_utils.AttentionInterface": None,
    "transformers.utils.logging": None,
    "transformers.utils.hub.cached_file": generation_file,
    "torch._dynamo.backends.registry.lookup_backend": None,
}
"""Imports from inside other packages. None: other tests use it as src does."""


def trees() -> Iterator[ast.Module]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def own_names() -> set[str]:
    """Private names that src defines itself: functions, classes, module and class variables, attributes of self.
    Not those that it defines in the place of transformers' own."""
    names: set[str] = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    return names - {"_attn_implementation", "_load_from_checkpoint", "_modules"}


def used_names() -> set[str]:
    """Private names that src looks up on any object: by attribute, by getattr, in a dictionary."""
    names: set[str] = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                pass  # documented, for all its underscore
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                names.add(name)
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                names.add(name)
            case _:
                pass
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_this_file_names_every_private_name_that_src_uses() -> None:
    assert used_names() - own_names() == set(PRIVATE)


def test_this_file_names_every_import_from_inside_other_packages() -> None:
    found = {
        f"{node.module}.{alias.name}"
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(("transformers.", "torch._"))
        for alias in node.names
    }
    assert found == set(INTERNAL)


@pytest.mark.parametrize(
    "check", dict.fromkeys([*PRIVATE.values(), *filter(None, INTERNAL.values())]), ids=lambda one: one.__name__
)
def test_what_is_expected_of(check: Callable[[], None]) -> None:
    check()


def test_custom_generate_is_given_what_is_expected() -> None:
    given = prepared(attention_mask=torch.tensor([[0, 1, 1]]), do_sample=True, temperature=0.5, max_new_tokens=4)
    assert given["model"] is families.cached("llama")
    assert given["input_ids"].tolist() == [[5, 6, 7]]
    assert given["config"].max_length == 7
    assert given["config"] is not families.cached("llama").generation_config
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    assert set(given["model_kwargs"]) <= known
    assert given["model_kwargs"]["attention_mask"].tolist() == [[0, 1, 1]]
    assert given["model_kwargs"]["past_key_values"].get_seq_length() == 0
    assert [type(one).__name__ for one in given["logits_processor"]] == ["TemperatureLogitsWarper", "TopKLogitsWarper"]
    assert prepared(attention_mask=torch.ones((1, 3)), max_new_tokens=4)["model_kwargs"]["attention_mask"] is None


def test_the_version_is_one_that_the_package_asks_for() -> None:
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (5, 20) <= (major, minor) < (6, 0)
