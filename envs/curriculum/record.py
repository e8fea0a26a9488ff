"""What is known of a prompt that was asked."""

from dataclasses import dataclass


@dataclass(slots=True)
class Asked:
    """recent: its recent success, 0 to 1. solved: a group of it once reached `env.curriculum.solved`.

    flying: groups that are answering it now. Of its newest draw: weight, as in `Window.add`; replay: it was asked again
    because it had been solved.
    """

    recent: float
    solved: bool = False
    flying: int = 0
    weight: float = 1.0
    replay: bool = False
