"""Measures grpo.py on GPUs with random weights, beside the dry run.

    python benchmarks/gpu.py                                    Qwen2.5-1.5B, all GPUs
    python benchmarks/gpu.py --model Qwen/Qwen2.5-7B-Instruct train_model.lora.enabled=true
    python benchmarks/gpu.py --model tiny device=cpu inference_model.backend=transformers       tries the script

The further arguments are settings of `grpo.py`; the others are those of `config/base_gpu.yaml`, without KL and
checkpoints. Nothing is downloaded: the model has random weights in the sizes of a model that the dry run knows by
name, and a tokenizer that has every id. Nearly all answers run to `inference_model.max_tokens`. The reward differs
among random answers, so all groups have a gradient. The dry run prices a microbatch of the longest answers. Measured
values are medians after the second iteration, since the first two may compile. Peaks of memory need an engine in a
process of its own (`ray.enabled=true` on one GPU).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import QUIET, ROOT, compose_config, describe_machine, make_parser
from torchgrpo.plan.known_models import KNOWN_MODELS

SPECIAL_TOKENS = ("<pad>", "<end>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
TINY = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SETTINGS = (
    "env.dataset=arithmetic",
    "env.reward=benchmarks.peer_processes:share_of_even",
    "policy.kl_coef=0",
    "train.export=false",
)
ROWS = {
    "throughput/learner_tokens_per_s": "learner, tokens/s",
    "throughput/learner_mfu": "learner, MFU",
    "memory/learner_peak_gib": "learner, peak GiB",
    "throughput/tokens_per_s": "whole iteration, response tokens/s",
    "time/collect_s": "generation, s",
    "time/optimize_s": "learner, s",
    "time/push_s": "push, s",
}
"""Metrics of a run, and their names in the table."""


def save_random_model(name: str, folder: Path) -> None:
    """Saves random bfloat16 weights of a known model's sizes, and a tokenizer."""
    fields = TINY if name == "tiny" else KNOWN_MODELS[name]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(**fields | ids)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokens += [f"w{index}" for index in range(len(tokens), config.vocab_size)]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    pad, end = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)


def run_script(*arguments: str) -> str:
    """Runs grpo.py and returns its output.

    A run that fails ends this process with its output.
    """
    command = [sys.executable, str(ROOT / "grpo.py"), "--config-name", "base_gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def print_measured(rows: Sequence[dict[str, float]], first_row: int) -> None:
    """Prints medians of metrics, and their first values. first_row: first row of the medians."""
    for metric, label in ROWS.items():
        values = [row[metric] for row in rows[first_row:] if metric in row]
        if values:
            print(
                f"  {label:36} {statistics.median(values):10.4g}   first step {rows[0].get(metric, float('nan')):.4g}"
            )


def main() -> None:
    parser = make_parser(__doc__, iterations=6)
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", help="a name in known_models.py, or tiny")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of grpo.py")
    options = parser.parse_args()
    if options.model != "tiny" and options.model not in KNOWN_MODELS:
        parser.error(f"--model {options.model}: not one of tiny, {', '.join(KNOWN_MODELS)}")
    with tempfile.TemporaryDirectory() as folder:
        model, run_dir = Path(folder) / "model", Path(folder) / "run"
        save_random_model(options.model, model)
        settings = [*SETTINGS, *QUIET, f"model.name={model}", *options.settings]
        config = compose_config("base_gpu", *settings)
        completions = options.iterations * config.completions_per_iteration
        dry_run = run_script("run=dry_run", f"hydra.run.dir={Path(folder) / 'dry_run'}", *settings)
        run_script(f"hydra.run.dir={run_dir}", f"train.total_dialog_turns={completions}", *settings)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    print(f"{describe_machine()}\n{options.model}: {' '.join(options.settings)}\n{dry_run}\nmeasured:")
    print_measured([row for row in rows if "time/optimize_s" in row], 2 * config.optimizer_steps_per_iteration)


if __name__ == "__main__":
    main()
