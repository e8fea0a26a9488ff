"""Ranks that read their own shards of a model from its files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from tests.tiny_models import tiny_llama
from torchgrpo.training import shard_files
from torchgrpo.training.learner_models import check_tied_head
from torchgrpo.training.model_loading import load_model, make_skeleton
from torchgrpo.training.shard_files import find_shard_files, load_shards
from torchgrpo.training.sharding import ShardedModel, learner_mesh, local_shard, shard_model

CPU = torch.device("cpu")
FILE = "model.safetensors"


class RecordingFile:
    """A safetensors file that records the bytes of the rows that are read."""

    read_bytes = 0

    def __init__(self, *arguments: Any) -> None:
        self.file = safetensors.safe_open(*arguments)
        self.keys = self.file.keys

    def __enter__(self) -> "RecordingFile":
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> "RecordingSlice":
        return RecordingSlice(self.file.get_slice(name))


class RecordingSlice:
    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.get_dtype, self.get_shape = rows.get_dtype, rows.get_shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        values: torch.Tensor = self.rows[rows]
        RecordingFile.read_bytes += values.nbytes
        return values


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """A rank whose collectives do nothing, as if the others agreed with it."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def load_rank(config: ModelConfig, rank: int, ranks: int) -> ShardedModel:
    """Loads the shards of a rank."""
    with rank_of(rank, ranks):
        files = find_shard_files(config)
        assert files is not None
        root = shard_model(make_skeleton(config), learner_mesh("cpu", ranks, ranks), None)
        load_shards(root.to_empty(device=CPU), config, files)
        return root


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny_llama(request.param).save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_and_buffers_equal_those_of_the_whole_model(folder: Path, ranks: int, dtype: str) -> None:
    """Compares the shards of ranks, of which the last may have fewer rows."""
    config = ModelConfig(str(folder), dtype)
    whole = load_model(config, CPU)
    shards = [load_rank(config, rank, ranks).model for rank in range(ranks)]
    for name, weight in whole.named_parameters():
        rows = torch.cat([local_shard(model.get_parameter(name)) for model in shards])
        assert rows.dtype == weight.dtype and torch.equal(rows, weight), name
    for name, buffer in whole.named_buffers():
        assert all(torch.equal(model.get_buffer(name), buffer) for model in shards), name


def test_a_rank_reads_the_bytes_of_its_shards_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "safe_open", RecordingFile)
    whole_bytes = sum(weight.nbytes for weight in load_model(ModelConfig(str(folder)), CPU).parameters())
    for rank in range(2):
        RecordingFile.read_bytes = 0
        load_rank(ModelConfig(str(folder)), rank, 2)
        assert RecordingFile.read_bytes == whole_bytes / 2


def change_file(folder: Path, name: str, weight: torch.Tensor | None) -> None:
    """Replaces a weight of the single file of a model, or removes it."""
    weights = load_file(folder / FILE)
    weights.pop(name, None)
    save_file(weights | ({} if weight is None else {name: weight}), folder / FILE, {"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "weight"),
    [(NORM, None), (NORM, torch.ones(63)), ("another.weight", torch.ones(2)), (NORM, torch.ones(64, dtype=torch.int8))],
    ids=["missing", "other shape", "unexpected", "whole numbers"],
)
def test_files_of_other_tensors_are_left_to_the_library(name: str, weight: torch.Tensor | None, tmp_path: Path) -> None:
    """Rank 0 then reads the whole model, with the library's checks and messages."""
    tiny_llama().save_pretrained(tmp_path)
    with rank_of(0, 2):
        assert find_shard_files(ModelConfig(str(tmp_path))) is not None
        change_file(tmp_path, name, weight)
        assert find_shard_files(ModelConfig(str(tmp_path))) is None


def test_a_node_with_other_files_leaves_them_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path)

    def reduce_with_another_rank(extremes: torch.Tensor, operation: object) -> None:
        extremes.copy_(torch.minimum(extremes, torch.tensor([7, -7])))

    monkeypatch.setattr(dist, "all_reduce", reduce_with_another_rank)
    assert find_shard_files(ModelConfig(str(tmp_path))) is None


def test_weights_in_the_middle_of_a_file_are_compared_between_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged adapter changes neither the size of a file nor its last weight."""
    tiny_llama().save_pretrained(tmp_path)
    digests: list[list[int]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda extremes, operation: digests.append(extremes.tolist()))
    find_shard_files(ModelConfig(str(tmp_path)))
    change_file(tmp_path, "model.layers.1.self_attn.v_proj.weight", torch.zeros(64, 64))
    find_shard_files(ModelConfig(str(tmp_path)))
    assert digests[0] != digests[1] and 0 not in (*digests[0], *digests[1])


def test_an_index_that_names_another_file_is_left_to_the_library(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with rank_of(0, 2):
        assert find_shard_files(ModelConfig(str(tmp_path))) is None
    load_model(ModelConfig(str(tmp_path)), CPU)


def test_a_head_of_its_own_is_refused_where_the_config_ties_it(tmp_path: Path) -> None:
    """Ranks have the tensors of the config, and would drop this head."""
    tiny_llama(tied=True).save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path))
    check_tied_head(config.name, load_model(config, CPU), make_skeleton(config))
    change_file(tmp_path, "lm_head.weight", torch.ones(40, 64))
    with pytest.raises(ConfigError, match=r"other values for lm_head\.weight; set tie_word_embeddings=false"):
        check_tied_head(config.name, load_model(config, CPU), make_skeleton(config))


@pytest.mark.parametrize("rank", [0, 1])
def test_values_that_are_not_finite_have_the_message_of_the_whole_model(rank: int, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    change_file(tmp_path, NORM, torch.full((64,), torch.inf))
    with pytest.raises(ConfigError) as whole:
        load_model(ModelConfig(str(tmp_path)), CPU)
    with pytest.raises(ConfigError) as shards:
        load_rank(ModelConfig(str(tmp_path)), rank, 2)
    assert str(shards.value) == str(whole.value)


def test_logits_that_change_after_the_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path)
    forward = LlamaForCausalLM.forward

    def capped_forward(*arguments: Any, **options: Any) -> Any:
        out = forward(*arguments, **options)
        out.logits = out.logits.tanh()
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", capped_forward)
    with pytest.raises(ConfigError, match="changes its logits after the output head"):
        load_rank(ModelConfig(str(tmp_path)), 0, 1)
