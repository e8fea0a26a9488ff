"""Distillation on the quickstart: does a teacher lift it, with nothing else to learn from?

    python benchmarks/distillation.py [--policies opd opsd] [--seeds 0 1] [--keep FOLDER] [key=value ...]

For `opd` the quickstart is first trained with rewards, which makes the teacher. For `opsd` the teacher is the policy
that it trains, shown the answer. The quickstart was never taught to read one (shown an answer it is right in one case
out of fifteen), so it first learns to, in a minute or two; without one it stays right about a third of the time.

Prints a line a run: share of right sums in the first iteration and in the last five. Exits with 1 if a run does not go
from 0.4 or less to 0.8. --keep: where the two models are left.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import grpo  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from models.make_quickstart import FOLDER, IGNORED, MAX_OPERAND, pad_batch, save, teach_answer  # noqa: E402
from run.jobs import run_job  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402

FROM, TO = 0.4, 0.8
TURNS = 10_240
TEACHER_PROMPT = "{answer} {prompt}"
STEPS, BATCH, LEARNING_RATE = 300, 128, 1e-3
"""With which the quickstart learns to read an answer."""


def train(folder: Path, overrides: Sequence[str]) -> tuple[float, float]:
    """Train a run; its mean reward in the first iteration and in the last five."""
    quiet = ["logging.progress=false", "logging.sample_frequency=0", "train.checkpoint_frequency=0"]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        config = to_config(compose("grpo_quickstart", overrides=[*quiet, *overrides]))
    folder.mkdir(parents=True, exist_ok=True)
    run_job(config, folder, grpo.train, Lockstep)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    return rewards[0], sum(rewards[-5:]) / 5


def teach_to_read(folder: Path) -> None:
    """Train the quickstart to read an answer that it is shown.

    Without one it stays as sloppy as its teacher.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    generator = random.Random(0)
    for _ in range(STEPS):
        prompts, answers = [], []
        for row in range(BATCH):
            a, b = generator.randint(0, MAX_OPERAND), generator.randint(0, MAX_OPERAND)
            asked, shows = f"{a}+{b}=", row % 4 == 0
            seen = TEACHER_PROMPT.format(prompt=asked, answer=a + b) if shows else asked
            prompts.append(f"<bos><user>{seen}<assistant>")
            answers.append(f"{a + b if shows else teach_answer(a + b, generator)}<eos>")
        asked_ids, answer_ids = (tokenizer(texts)["input_ids"] for texts in (prompts, answers))
        ids, labels = pad_batch(asked_ids, answer_ids, tokenizer.pad_token_id)
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    save(model, tokenizer, folder)


def prepared(policy: str, folder: Path) -> list[str]:
    """The settings of a policy, whose other model is made in a folder, once."""
    if policy == "opd":
        if not (folder / "teacher" / "model").is_dir():
            train(folder / "teacher", ["train.export=true"])
        return [f"ref_model.name={folder / 'teacher' / 'model'}"]
    if not (folder / "reader").is_dir():
        teach_to_read(folder / "reader")
    return [f"model.name={folder / 'reader'}", f'policy.teacher_prompt="{TEACHER_PROMPT}"']


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=["opd", "opsd"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    register_schema()
    torch.set_num_threads(1)
    lifted = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        for policy in asked.policies:
            settings = [f"policy={policy}", f"train.total_dialog_turns={TURNS}", *prepared(policy, folder)]
            for seed in asked.seeds:
                run = Path(scratch) / f"{policy}_{seed}"
                before, after = train(run, [*settings, f"train.seed={seed}", *asked.overrides])
                lifted &= before <= FROM and after >= TO
                print(f"policy={policy} seed {seed}: {before:.3f} -> {after:.3f}", flush=True)
    sys.exit(not lifted)


if __name__ == "__main__":
    main()
