"""A checkpoint as a folder in Hugging Face format, a tensor at a time: the model is never whole in memory.

checkpoint_000040/learner/, files of model.name ──a tensor──▶ adapters merged in, as a push does ──▶ FOLDER/
the adapter's tensors ──▶ FOLDER/adapter/, under peft's names
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from config.schema.models import LoraConfig, ModelConfig
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training import base_files
from torchgrpo.training.adapters import add_lora, linear_names
from torchgrpo.training.base_files import Base
from torchgrpo.training.checkpoint_tensors import SavedTensors, saved_shapes
from torchgrpo.training.model_files import check_files
from torchgrpo.training.model_loading import end_tokens, load_saved_tokenizer, skeleton
from torchgrpo.training.published_weights import PolicyTensor, named_weights
from torchgrpo.training.quantization import packed_in_4_bits, through_4_bits
from torchgrpo.training.safetensors_writer import Part, write_safetensors
from torchgrpo.training.trained_parameters import MODEL, brought, check_same_model, digest_of

ADAPTER = "adapter"
"""The folder of the adapter alone, inside the model's."""


class ModelWriter:
    """Writes checkpoints of a policy as models that transformers, vLLM and `model.name` load.

    It has the policy's layers without memory. Made in the main thread, for making layers changes torch's defaults
    meanwhile; where `streams`, it may write in another one.

    Args:
        model: what the policy began from.

    Raises:
        ConfigError: there is no such model.
    """

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.model = model
        self.lora = lora
        self.tokenizer = load_saved_tokenizer(model)
        if lora.enabled:  # what a checkpoint does not hold comes from these files
            check_files(model, self.tokenizer)
        self.plain = skeleton(model)
        try:
            self.generation = GenerationConfig.from_pretrained(model_path(model.name))
        except OSError:  # a model without one of its own
            self.generation = self.plain.generation_config
        self.generation._from_model_config = False
        ends = end_tokens(self.generation, self.tokenizer)  # where the engines of training end a completion
        self.generation.eos_token_id = ends[0] if len(ends) == 1 else ends
        self.plain.config.architectures = [type(self.plain).__name__]
        self.plain.config.dtype = model.dtype
        parameters = dict(self.plain.named_parameters(remove_duplicate=False))
        self._names = {id(one): name for name, one in reversed(parameters.items())}
        tied = parameters.keys() - self._names.values()
        self.adapted = linear_names(self.plain)
        self.policy: Any = self.plain
        if lora.enabled:
            with torch.device("meta"):
                self.policy = add_lora(self.plain, lora)
        self.weights = [one for one in named_weights(self.policy) if one.name not in tied]
        self._modules = {module: name for name, module in self.policy.named_modules()}
        self._streamed = base_files.streamed(model, self._names.values())

    @property
    def streams(self) -> bool:
        """Whether it never loads a model: no base is needed, or its files are read a tensor at a time."""
        return self._streamed is not None or not self.lora.enabled

    @cached_property
    def base(self) -> Base:
        """The weights of `model.name`."""
        return self._streamed or base_files.loaded(self.model)

    def check(self, learner: Path, numbers: Mapping[str, Any]) -> None:
        """That a checkpoint is of this model. learner, numbers: the folder of its tensors, and what `described` said.

        Raises:
            ConfigError: it is of another one.
        """

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in brought(self.policy).items():
                weight = self.base(self._names[id(parameter)])
                in_4_bits = self.lora.quantized and ".base_layer.weight" in name
                yield name, packed_in_4_bits(weight)[0] if in_4_bits else weight

        check_same_model(self.policy, digest_of(weights()), numbers, saved_shapes(learner))

    def write(self, learner: Path, folder: Path) -> None:
        """Fill a folder from that of a checkpoint's tensors (`learner`). Raises UnreadableError."""
        saved = SavedTensors(learner)
        write_safetensors(folder, self._parts(saved))
        self.plain.config.save_pretrained(folder)
        self.generation.to_json_file(folder / "generation_config.json")
        self.tokenizer.save_pretrained(folder)
        if not self.lora.enabled:
            return
        (adapter,) = self.policy.peft_config
        settings = deepcopy(self.policy.peft_config[adapter])
        settings.inference_mode = True
        settings.target_modules = set(self.adapted)
        settings.save_pretrained(folder / ADAPTER)
        mine = [name for name in saved.names if name.startswith(MODEL) and ".lora_" in name]
        plain = {name: name.removeprefix(MODEL).replace(f".{adapter}.", ".") for name in mine}
        parts = [
            Part({plain[name]: saved.described(name)}, partial(_only, plain[name], partial(saved.read, name)))
            for name in mine
        ]
        whole = sum(part.nbytes for part in parts)
        write_safetensors(folder / ADAPTER, parts, "adapter_model", largest=whole)

    def _parts(self, saved: SavedTensors) -> list[Part]:
        """A tensor each; a layer each where files name and cut this model's tensors otherwise than it does."""
        described = {one.name: self._found(one, saved, SavedTensors.described) for one in self.weights}
        made = {one.name: partial(self._made, one, saved) for one in self.weights}
        if self._as_in_files(described).keys() == described.keys():
            return [Part({name: one}, partial(_only, name, made[name])) for name, one in described.items()]

        def of_layer(names: list[str]) -> dict[str, Tensor]:
            return self._as_in_files({name: made[name]() for name in names})

        layers: dict[str, list[str]] = {}
        for name in described:
            layer = re.match(r".*\blayers\.\d+\.", name)
            layers.setdefault(layer[0] if layer else name, []).append(name)
        return [
            Part(
                self._as_in_files({name: described[name] for name in names}),
                partial(of_layer, names),
            )
            for names in layers.values()
        ]

    def _as_in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamed: dict[str, Tensor] = revert_weight_conversion(self.plain, dict(tensors))
        return renamed

    def _found(self, tensor: PolicyTensor, saved: SavedTensors, read: Any) -> Tensor:
        """What a checkpoint holds of a tensor, by `read`, or else the model's own."""
        name = f"{MODEL}{'base_model.model.' if self.lora.enabled else ''}{tensor.name}"  # as peft wraps it
        found: Tensor = read(saved, name) if name in saved else tensor.source
        return found

    def _made(self, tensor: PolicyTensor, saved: SavedTensors) -> Tensor:
        source = self._found(tensor, saved, SavedTensors.read)
        if source.is_meta:
            source = self.base(tensor.name)
            if self.lora.quantized and tensor.layer is not None:
                source = through_4_bits(source)
        empty: list[tuple[nn.Module, str, nn.Parameter]] = []  # adapters, which have their values meanwhile
        for module in () if tensor.layer is None else tensor.layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    empty.append((module, name, parameter))
                    values = saved.read(f"{MODEL}{self._modules[module]}.{name}")
                    setattr(module, name, nn.Parameter(values))
        try:
            return replace(tensor, source=source, dtype=source.dtype).make()
        finally:
            for module, name, parameter in empty:
                setattr(module, name, parameter)


def _only(name: str, make: "partial[Tensor]") -> dict[str, Tensor]:
    return {name: make()}
