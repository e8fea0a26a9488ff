"""Writes a checkpoint as a model folder in Hugging Face format.

checkpoint_000040/learner/, files of model.name ──one tensor──▶ adapters merged in, as for a push ──▶ FOLDER/
the adapter's tensors ──▶ FOLDER/adapter/, under peft's names

Tensors are written one at a time; the full model is never in memory.
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
from torchgrpo.training import base_weights
from torchgrpo.training.adapters import add_lora, linear_layer_names
from torchgrpo.training.base_weights import WeightReader
from torchgrpo.training.checkpoint_tensors import SavedTensors, saved_shapes
from torchgrpo.training.model_files import check_model_files
from torchgrpo.training.model_loading import end_tokens, load_saved_tokenizer, make_skeleton
from torchgrpo.training.published_weights import PolicyTensor, named_weights
from torchgrpo.training.quantization import pack_4bit, round_trip_4bit
from torchgrpo.training.safetensors_writer import TensorGroup, write_safetensors
from torchgrpo.training.trained_parameters import MODEL_PREFIX, base_parameters, check_same_model, digest_tensors

ADAPTER = "adapter"
"""Name of the adapter's own folder inside the model's folder."""


class ModelWriter:
    """Writes checkpoints of a policy as models that transformers, vLLM and `model.name` load.

    The writer has the policy's layers on the meta device. Create it in the main thread, for creating layers
    changes torch's global defaults meanwhile. Where `can_stream`, it may write in another thread.

    Args:
        model: the model that the policy started from.

    Raises:
        ConfigError: there is no such model.
    """

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.model = model
        self.lora = lora
        self.tokenizer = load_saved_tokenizer(model)
        if lora.enabled:  # the base weights come from these files
            check_model_files(model, self.tokenizer)
        self.base_model = make_skeleton(model)
        try:
            self.generation = GenerationConfig.from_pretrained(model_path(model.name))
        except OSError:  # the model has no generation config
            self.generation = self.base_model.generation_config
        self.generation._from_model_config = False
        ends = end_tokens(self.generation, self.tokenizer)  # the end tokens of the training engines
        self.generation.eos_token_id = ends[0] if len(ends) == 1 else ends
        self.base_model.config.architectures = [type(self.base_model).__name__]
        self.base_model.config.dtype = model.dtype
        parameters = dict(self.base_model.named_parameters(remove_duplicate=False))
        self._names = {id(one): name for name, one in reversed(parameters.items())}
        tied = parameters.keys() - self._names.values()
        self.adapter_layer_names = linear_layer_names(self.base_model)
        self.policy: Any = self.base_model
        if lora.enabled:
            with torch.device("meta"):
                self.policy = add_lora(self.base_model, lora)
        self.weights = [one for one in named_weights(self.policy) if one.name not in tied]
        self._modules = {module: name for name, module in self.policy.named_modules()}
        self._weight_stream = base_weights.stream_weights(model, self._names.values())

    @property
    def can_stream(self) -> bool:
        """Whether the writer never loads a whole model.

        The base weights are then not needed, or read one tensor at a time.
        """
        return self._weight_stream is not None or not self.lora.enabled

    @cached_property
    def read_base_weight(self) -> WeightReader:
        """The reader of the weights of `model.name`."""
        return self._weight_stream or base_weights.load_weights(self.model)

    def check_checkpoint(self, learner: Path, scalar_state: Mapping[str, Any]) -> None:
        """Checks that a checkpoint belongs to this model.

        learner: the folder of the checkpoint's tensors. scalar_state: the learner's entry of `run.pt`.

        Raises:
            ConfigError: the checkpoint belongs to another model.
        """

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in base_parameters(self.policy).items():
                weight = self.read_base_weight(self._names[id(parameter)])
                in_4_bits = self.lora.quantized and ".base_layer.weight" in name
                yield name, pack_4bit(weight)[0] if in_4_bits else weight

        check_same_model(self.policy, digest_tensors(weights()), scalar_state, saved_shapes(learner))

    def write(self, learner: Path, folder: Path) -> None:
        """Writes the model folder of a checkpoint. Raises UnreadableError.

        learner: the folder of the checkpoint's tensors.
        """
        checkpoint = SavedTensors(learner)
        write_safetensors(folder, self._tensor_groups(checkpoint))
        self.base_model.config.save_pretrained(folder)
        self.generation.to_json_file(folder / "generation_config.json")
        self.tokenizer.save_pretrained(folder)
        if not self.lora.enabled:
            return
        (adapter,) = self.policy.peft_config
        settings = deepcopy(self.policy.peft_config[adapter])
        settings.inference_mode = True
        settings.target_modules = set(self.adapter_layer_names)
        settings.save_pretrained(folder / ADAPTER)
        adapter_names = [name for name in checkpoint.names if name.startswith(MODEL_PREFIX) and ".lora_" in name]
        file_names = {name: name.removeprefix(MODEL_PREFIX).replace(f".{adapter}.", ".") for name in adapter_names}
        groups = [
            TensorGroup(
                {file_names[name]: checkpoint.meta_tensor(name)},
                partial(_named_tensor, file_names[name], partial(checkpoint.read, name)),
            )
            for name in adapter_names
        ]
        total_bytes = sum(group.nbytes for group in groups)
        write_safetensors(folder / ADAPTER, groups, "adapter_model", max_file_bytes=total_bytes)

    def _tensor_groups(self, checkpoint: SavedTensors) -> list[TensorGroup]:
        """Returns one group per tensor, or one per layer.

        The latter where files name and split tensors differently from the model.
        """
        meta_tensors = {one.name: self._saved_tensor(one, checkpoint, SavedTensors.meta_tensor) for one in self.weights}
        merge_calls = {one.name: partial(self._merged_tensor, one, checkpoint) for one in self.weights}
        if self._to_file_format(meta_tensors).keys() == meta_tensors.keys():
            return [
                TensorGroup({name: one}, partial(_named_tensor, name, merge_calls[name]))
                for name, one in meta_tensors.items()
            ]

        def make_layer(names: list[str]) -> dict[str, Tensor]:
            """Returns the values of one layer under their names in files."""
            return self._to_file_format({name: merge_calls[name]() for name in names})

        layers: dict[str, list[str]] = {}
        for name in meta_tensors:
            layer = re.match(r".*\blayers\.\d+\.", name)
            layers.setdefault(layer[0] if layer else name, []).append(name)
        return [
            TensorGroup(self._to_file_format({name: meta_tensors[name] for name in names}), partial(make_layer, names))
            for names in layers.values()
        ]

    def _to_file_format(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors of the model to the names and shapes of its files."""
        renamed: dict[str, Tensor] = revert_weight_conversion(self.base_model, dict(tensors))
        return renamed

    def _saved_tensor(self, tensor: PolicyTensor, checkpoint: SavedTensors, read: Any) -> Tensor:
        """Reads a tensor of a checkpoint by `read`.

        Returns the model's own tensor where the checkpoint lacks it.
        """
        name = f"{MODEL_PREFIX}{'base_model.model.' if self.lora.enabled else ''}{tensor.name}"  # as peft wraps it
        found: Tensor = read(checkpoint, name) if name in checkpoint else tensor.source
        return found

    def _merged_tensor(self, tensor: PolicyTensor, checkpoint: SavedTensors) -> Tensor:
        """Computes a tensor from the checkpoint and the base weights, adapters merged in."""
        source = self._saved_tensor(tensor, checkpoint, SavedTensors.read)
        if source.is_meta:
            source = self.read_base_weight(tensor.name)
            if self.lora.quantized and tensor.layer is not None:
                source = round_trip_4bit(source)
        meta_parameters: list[tuple[nn.Module, str, nn.Parameter]] = []  # adapters with saved values meanwhile
        for module in () if tensor.layer is None else tensor.layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    meta_parameters.append((module, name, parameter))
                    values = checkpoint.read(f"{MODEL_PREFIX}{self._modules[module]}.{name}")
                    setattr(module, name, nn.Parameter(values))
        try:
            return replace(tensor, source=source, dtype=source.dtype).make()
        finally:
            for module, name, parameter in meta_parameters:
                setattr(module, name, parameter)


def _named_tensor(name: str, make: "partial[Tensor]") -> dict[str, Tensor]:
    """Returns the result of `make` under one name."""
    return {name: make()}
