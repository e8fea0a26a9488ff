"""What the loss costs: log-probs + objective + backward, ours beside the plain gather and TorchRL's GRPOLoss.

    python benchmarks/loss.py              16 x 512 tokens, vocabulary 151,936: 14 to 20 GiB with full logits
    python benchmarks/loss.py --small      2 x 256 tokens
    python benchmarks/loss.py --hidden 896 --device cuda

The same random causal language model (one layer), the same tokens, the same objective in every variant, each
in a process of its own. Memory is the peak above weights, gradients and libraries after a warm-up on eight
tokens. Ratios are to the plain gather: `memory` should be at most 0.25 and `time` at most 1.1 for ours.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("ours", "gather", "torchrl")
GIB = 2**30


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="2 x 256 tokens")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64, help="width of the body")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk-size", type=int, default=None, help="rows of logits at one time; ours only")
    parser.add_argument("--memory-limit-gib", type=float, default=None, help="address space of a variant")
    parser.add_argument("--variant", choices=VARIANTS, default=None, help="run this one here")
    options = parser.parse_args(arguments)
    if options.small:
        options.rows, options.length = 2, 256
    return options


class Case:
    """The model and one batch: tokens [rows, length + 1], of which all but the first are the response."""

    def __init__(self, options: argparse.Namespace, rows: int, length: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        shape = (rows, length)
        self.ids = torch.randint(options.vocabulary, (rows, length + 1), generator=generator)
        self.engine = -torch.rand(shape, generator=generator) - 11.5
        self.advantage = torch.randn(rows, 1, generator=generator)
        self.mask = torch.ones(shape, dtype=torch.bool)
        for name in ("ids", "engine", "advantage", "mask"):
            setattr(self, name, getattr(self, name).to(options.device))


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=1,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype))


def loss_of(model: Any, case: Case, log_prob: Any) -> Any:
    from config.policy import PolicyConfig
    from training.loss import objective

    policy = PolicyConfig(kl_coef=0.0)
    return objective(policy, log_prob, case.engine, None, None, case.advantage, case.mask)[0]


def ours(model: Any, case: Case, options: argparse.Namespace) -> Any:
    from training.log_probs import selected_log_probs

    hidden = model.model(case.ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    targets = case.ids[:, 1:].flatten()
    log_prob, _ = selected_log_probs(
        hidden, model.lm_head.weight, None, targets, chunk_size=options.chunk_size
    )
    return loss_of(model, case, log_prob.view_as(case.engine))


def gather(model: Any, case: Case, options: argparse.Namespace) -> Any:
    logits = model(case.ids[:, :-1], use_cache=False).logits
    log_prob = logits.float().log_softmax(-1).gather(-1, case.ids[:, 1:, None]).squeeze(-1)
    return loss_of(model, case, log_prob)


def torchrl(model: Any, case: Case, options: argparse.Namespace) -> Any:
    import torch
    from tensordict import TensorDict
    from torchrl.modules.distributions import LLMMaskedCategorical
    from torchrl.objectives.llm import GRPOLoss

    class Actor(torch.nn.Module):
        in_keys = ()

        def get_dist(self, tensordict: TensorDict, logits_key: str) -> LLMMaskedCategorical:
            logits = model(case.ids[:, :-1], use_cache=False).logits
            return LLMMaskedCategorical(logits=logits.float(), mask=case.mask)

    advantage = case.advantage[..., None].expand(*case.engine.shape, 1)
    batch = TensorDict(
        {("tokens", "full"): case.ids[:, 1:], ("log_probs", "full"): case.engine, "advantage": advantage},
        batch_size=[len(case.ids)],
    )
    loss = GRPOLoss(Actor(), masking_strategy="generic", entropy_bonus=False, device=case.ids.device)
    return loss(batch).loss_objective


LOSSES: dict[str, Callable[[Any, Case, argparse.Namespace], Any]] = {
    "ours": ours,
    "gather": gather,
    "torchrl": torchrl,
}


class PeakMemory:
    """Peak bytes above what is held at the start: of the process, or of the CUDA allocator."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
            self.start = self._status("VmRSS")

    def _status(self, key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def above(self) -> int:
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated() - self.start
        return self._status("VmHWM") - self.start


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(options.threads)
    if options.memory_limit_gib is not None:
        limit = int(options.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    loss_function = LOSSES[options.variant]
    model = make_model(options)
    loss_function(model, Case(options, 1, 8), options).backward()
    case = Case(options, options.rows, options.length)
    memory, walls, cpus = PeakMemory(options.device), [], []
    for _ in range(options.repeats):
        model.zero_grad(set_to_none=False)
        start = time.perf_counter(), time.process_time()
        loss = loss_function(model, case, options)
        loss.backward()
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - start[0])
        cpus.append(time.process_time() - start[1])
    return {
        "loss": loss.item(),
        "wall_s": statistics.median(walls),
        "cpu_s": statistics.median(cpus),
        "peak_gib": memory.above() / GIB,
    }


def run_variant(variant: str, arguments: list[str]) -> dict[str, float] | None:
    """Numbers of one variant from a process of its own; None when it ran out of memory."""
    command = [sys.executable, __file__, *arguments, "--variant", variant]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode == -9 or "allocate" in process.stderr or "out of memory" in process.stderr:
        return None
    raise RuntimeError(f"{variant} failed:\n{process.stderr}")


def main() -> None:
    options, arguments = parse(), sys.argv[1:]
    if options.variant is not None:
        print(json.dumps(measure(options)))
        return
    results = {variant: run_variant(variant, arguments) for variant in VARIANTS}
    tokens = options.rows * options.length
    print(
        f"{options.rows} x {options.length} = {tokens} tokens, vocabulary {options.vocabulary:,}, width "
        f"{options.hidden}, {options.dtype} on {options.device}, {options.threads} threads, "
        f"median of {options.repeats}"
    )
    columns = ("peak GiB", "wall s", "CPU s", "memory", "time", "CPU time", "loss")
    print(" " * 10 + "".join(f"{column:>10}" for column in columns))
    plain = results["gather"]
    for variant, result in results.items():
        if result is None:
            print(f"{variant:10}  ran out of memory")
            continue
        measured = [result[key] for key in ("peak_gib", "wall_s", "cpu_s")]
        ratios = [
            result[key] / plain[key] if plain else float("nan") for key in ("peak_gib", "wall_s", "cpu_s")
        ]
        numbers = "".join(f"{number:10.2f}" for number in (*measured, *ratios))
        print(f"{variant:10}{numbers}{result['loss']:10.5f}")


if __name__ == "__main__":
    main()
