"""Trains with GRPO in lockstep: collect groups, optimise, push the weights.

Every batch is on-policy.

    python grpo.py --config-name grpo_quickstart          a laptop CPU, a minute
    python grpo.py model.name=Qwen/Qwen2.5-3B-Instruct    GPUs; the default config is grpo_gsm8k

The methods of `run` are in torchgrpo/run/training_run.py, `collect` in torchgrpo/run/lockstep_run.py. The
overlapped schedule is grpo_async.py.
"""

from grpo_utils import launch
from torchgrpo.run.lockstep_run import LockstepRun


def train(run: LockstepRun) -> None:
    run.push_weights()  # the engines start from the learner's weights
    for iteration in run.iterations():
        rollout = run.collect()  # the environment: prompts -> completions -> rewards
        run.advantage(rollout)  # rewards against their group's; reference log-probs
        for minibatch in run.minibatches(rollout):
            run.learn(minibatch)  # loss -> gradient -> optimizer
        run.push_weights()  # the next groups are on-policy again
        run.end_iteration(iteration, rollout)  # evaluation, checkpoint, samples


def main() -> None:
    launch(train, LockstepRun)


if __name__ == "__main__":
    main()
