"""GRPO with overlap: engines keep generating while the learner optimises; no token is older than allowed.

    python grpo_async.py --config-name grpo_quickstart train.max_policy_age=1

The same configs as grpo.py. Groups stream into a buffer, the learner takes a batch as soon as one is there, and the
weights go back while requests run on. train.max_policy_age=0 is lockstep again. What each move does is in
torchgrpo/run/training_run.py and torchgrpo/run/overlapped.py.
"""

from grpo_utils import launch
from torchgrpo.run.overlapped import Overlapped


def train(run: Overlapped) -> None:
    run.push_weights()  # the engines start from the learner's weights
    with run.generation():  # beside this block; what fails there is raised here
        for step in run.steps():
            rollout = run.take()  # waits for groups, none older than allowed
            run.advantage(rollout)  # rewards against their group's; reference log-probs
            for _ in run.epochs():
                run.learn(rollout)  # loss -> gradient -> optimizer
            if run.push_due(step):
                run.push_weights()  # requests run on across the push
            run.done(step, rollout)  # evaluation, checkpoint, samples


def main() -> None:
    launch(train, Overlapped)


if __name__ == "__main__":
    main()
