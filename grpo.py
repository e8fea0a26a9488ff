"""GRPO in lockstep: collect groups, optimise on them, push the weights, again. Every batch is on-policy.

    python grpo.py --config-name grpo_quickstart          a laptop CPU, a minute
    python grpo.py model.name=Qwen/Qwen2.5-3B-Instruct    GPUs; the default config is grpo_gsm8k

What the parts are is in grpo_utils.py; the overlapped schedule is grpo_async.py.
"""

from config.schema import Config
from grpo_utils import launch
from run.parts import Parts


def train(config: Config, parts: Parts) -> None:
    parts.push_weights()
    for iteration in parts.iterations():
        with parts.monitor.timed("collect"):
            groups = parts.collect()
        with parts.monitor.timed("optimize"):
            batch = parts.learner.prepare(groups)
        for minibatch in parts.minibatches(batch):
            with parts.monitor.timed("optimize"):
                report = parts.learner.step(minibatch)
            parts.optimized(minibatch, report)
        parts.push_weights()
        parts.iteration_done(iteration, batch)


def main() -> None:
    launch(train)


if __name__ == "__main__":
    main()
