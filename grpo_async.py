"""GRPO with overlap: engines keep generating while the learner optimises; no token is older than allowed.

    python grpo_async.py --config-name grpo_quickstart train.max_policy_age=1

The same configs and parts as grpo.py. Groups stream into a buffer, the learner takes a batch as soon as one is
there, and the weights go back while requests run on. train.max_policy_age=0 is lockstep again.
"""

from config.schema import Config
from grpo_utils import launch
from run.parts import Parts


def train(config: Config, parts: Parts) -> None:
    parts.push_weights()
    with parts.streaming():
        for optimizer_batch in parts.optimizer_batches():
            with parts.monitor.timed("collect"):
                groups = parts.take()
            with parts.monitor.timed("optimize"):
                batch = parts.learner.prepare(groups)
            for _ in range(config.train.epochs):
                with parts.monitor.timed("optimize"):
                    report = parts.learner.step(batch)
                parts.optimized(batch, report)
            if parts.push_due(optimizer_batch):
                parts.push_weights()
            parts.iteration_done(optimizer_batch, batch)


if __name__ == "__main__":
    launch(train, overlapped=True)
