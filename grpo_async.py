"""Trains with GRPO while engines keep generating, with a bound on token age.

    python grpo_async.py --config-name grpo_quickstart train.max_policy_age=1

The same configs as grpo.py. Groups stream into a buffer, the learner takes a batch as soon as one is there, and
the weights go back while requests run on. train.max_policy_age=0 is lockstep again. The methods of `run` are in
torchgrpo/run/training_run.py and torchgrpo/run/overlapped_run.py.
"""

from grpo_utils import launch
from torchgrpo.run.overlapped_run import OverlappedRun


def train(run: OverlappedRun) -> None:
    run.push_weights()  # the engines start from the learner's weights
    with run.generation():  # beside this block; what fails there is raised here
        for step in run.steps():
            rollout = run.take_batch()  # waits for groups, none older than allowed
            run.advantage(rollout)  # rewards against their group's; reference log-probs
            for _ in run.epochs():
                run.learn(rollout)  # loss -> gradient -> optimizer
            if run.is_push_due(step):
                run.push_weights()  # requests run on across the push
            run.end_iteration(step, rollout)  # evaluation, checkpoint, samples


def main() -> None:
    launch(train, OverlappedRun)


if __name__ == "__main__":
    main()
