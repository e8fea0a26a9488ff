"""Tests that a compiled layer contains flex attention, in few variants of code.

PyTorch's CPU build runs flex attention's backward pass only without its kernel. The tests therefore trace and
differentiate layers as for a GPU, and compute the traced operations one by one.
"""

import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import flex_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from config.schema.errors import RunError
from tests.training.test_packed_sequence import SIZES, assert_same, rows, score_with_gradient
from torchgrpo.batches.batch import Tokens
from torchgrpo.training import packed_attention, response_scorer
from torchgrpo.training.layer_compilation import compile_layers
from torchgrpo.training.packed_attention import Segments
from torchgrpo.training.packed_sequence import PackedSequence, pack_rows, pad_to_blocks
from torchgrpo.training.response_scorer import ResponseScorer

TOKEN_BATCHES = (
    rows((4, 8, 3), ((2, 5), (9, 31), (6, 6))),  # below one block
    rows((100, 90), ((50, 20, 3), (30, 10))),
    rows((150,), ((220, 100, 1),)),
    rows((40, 300), ((250, 30), (9, 31, 5))),
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).train()


@pytest.fixture(autouse=True)
def flex_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses flex attention on the CPU, also with gradients, and traces from scratch."""
    monkeypatch.setattr(packed_attention, "FLEX_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    packed_attention._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    packed_attention._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def count_graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_compiled_layers_with_flex_attention_compute_the_same(
    uncompiled_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, entropies and gradients of a compiled model are those of attention by rows."""
    compiled, plain = make_model(), make_model()
    compile_layers(compiled)
    found = score_with_gradient(compiled, True, TOKEN_BATCHES[1])
    assert count_graphs() == 1
    monkeypatch.setattr(packed_attention, "FLEX_DEVICE_TYPES", ())
    assert_same(found, score_with_gradient(plain, True, TOKEN_BATCHES[1]), off=1e-5)


@pytest.mark.long
def test_ragged_microbatches_share_two_variants_of_code(uncompiled_kernels: None) -> None:
    """Layers share one graph, compiled once with gradients and once without."""
    model = make_model()
    compile_layers(model)
    scorer = ResponseScorer(model, autocast_dtype=torch.bfloat16)
    assert len({scorer.count_positions(tokens) for tokens in TOKEN_BATCHES}) > 2
    for tokens in TOKEN_BATCHES:
        scorer(tokens).log_prob.sum().backward()
        with torch.no_grad():
            scorer(tokens)
    assert count_graphs() == 2


def attend_alone(tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes flex attention of a padded sequence outside of a compiled layer."""
    segments = pad_to_blocks(pack_rows(tokens)).segments
    query, key, value = (torch.randn(1, heads, segments.total, 16, dtype=dtype) for heads in (6, 3, 3))
    mask = segments.block_mask(query.device)
    out: Tensor = packed_attention._flex_attention_alone(query, key, value, block_mask=mask, enable_gqa=True)
    return out


def test_attention_outside_of_a_layer_is_compiled_once(uncompiled_kernels: None) -> None:
    """Three blocks and three heads of keys are different sizes."""
    with torch.no_grad():
        for tokens in TOKEN_BATCHES:
            attend_alone(tokens)
    assert count_graphs() == 1


def test_the_limit_of_variants_is_an_error(uncompiled_kernels: None) -> None:
    """Stops past the limit: PyTorch would compute all scores without a message."""
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        attend_alone(TOKEN_BATCHES[0])
        with pytest.raises(RunError, match=r"train\.packing=true: PyTorch has compiled flex .*set train.packing"):
            attend_alone(TOKEN_BATCHES[0], torch.float64)


@pytest.mark.long
def test_the_limit_of_variants_of_a_layer_is_an_error(uncompiled_kernels: None) -> None:
    model = make_model()
    compile_layers(model)
    scorer = ResponseScorer(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        scorer(TOKEN_BATCHES[0])
        expected_message = r"^train\.compile: PyTorch .*recompile_limit=1 allows; .*set train\.compile=false$"
        with torch.no_grad(), pytest.raises(RunError, match=expected_message):
            scorer(TOKEN_BATCHES[0])


@pytest.mark.parametrize("tokens", TOKEN_BATCHES, ids=lambda tokens: str(pack_rows(tokens).segments.total))
def test_padding_is_whole_blocks_that_no_token_attends_to(tokens: Tokens) -> None:
    packed = pack_rows(tokens)
    padded = pad_to_blocks(packed)
    length, total = packed.segments.total, padded.segments.total
    assert total % 128 == 0 and total >= 384 and total - 384 < length
    assert padded.ids.shape == padded.positions.shape == (1, total)
    assert torch.equal(padded.ids[:, :length], packed.ids)
    assert padded.target_positions is packed.target_positions and int(padded.target_positions.max()) < length
    sees = flex_attention.create_mask(
        padded.segments.block_mask(torch.device("cpu")).mask_mod, None, None, total, total, device="cpu"
    )[0, 0]
    assert not sees[:length, length:].any() and not sees[length:, :length].any()
    assert sees.any(1).all(), "a position that attends to nothing would have no softmax"
    again = pad_to_blocks(padded)
    assert again is padded


@pytest.mark.long
def test_ids_of_padding_change_no_bit(uncompiled_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def pad_with_sevens(sequence: PackedSequence) -> PackedSequence:
        padded = pad_to_blocks(sequence)
        padded.ids[:, sequence.ids.shape[1] :] = 7
        return padded

    found = []
    for pad in (pad_to_blocks, pad_with_sevens):
        monkeypatch.setattr(response_scorer, "pad_to_blocks", pad)
        model = make_model()
        compile_layers(model)
        found.append(score_with_gradient(model, True, TOKEN_BATCHES[0]))
    (zeros, zeros_gradient), (sevens, sevens_gradient) = found
    assert torch.equal(zeros.log_prob, sevens.log_prob)
    assert torch.equal(zeros_gradient, sevens_gradient)


@torch.library.custom_op("torchgrpo_tests::attention", mutates_args=())
def opaque_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replaces the kernel of attention by one operation that inductor does not fuse."""
    return query.clone()


@torch.library.custom_op("torchgrpo_tests::attention_backward", mutates_args=())
def opaque_attention_backward(gradient: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gradient.clone(), key.clone(), value.clone()


opaque_attention.register_fake(lambda query, key, value: torch.empty_like(query))
opaque_attention_backward.register_fake(
    lambda gradient, key, value: (torch.empty_like(gradient), torch.empty_like(key), torch.empty_like(value))
)
opaque_attention.register_autograd(
    lambda ctx, gradient: opaque_attention_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


def attend_in_one_operation(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    half = torch.bfloat16
    return opaque_attention(query.to(half), key.to(half), value.to(half)).transpose(1, 2)


OPERATION = re.compile(r"^\s+(?:(?:\w+ = )?(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)|cpp_fused_\w+)\(", re.M)


@pytest.mark.long
def test_a_compiled_layer_has_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts fused loops, matrix products and attention in inductor's code of a layer."""
    monkeypatch.setattr(packed_attention, "_attend_with_flex", attend_in_one_operation)
    model = make_model()
    compile_layers(model)
    scorer = ResponseScorer(model, autocast_dtype=torch.bfloat16)
    _, sources = run_and_get_code(lambda: scorer(TOKEN_BATCHES[1]).log_prob.sum().backward())
    counts = [len(OPERATION.findall(source)) for source in sources]
    assert count_graphs() == 1 and len(counts) == 2, "forward and backward code of one graph"
    assert 23 < sum(counts) < 70, counts
