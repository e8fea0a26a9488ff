"""Ray actor of a scorer rank with the frozen model or a shard."""

from collections.abc import Sequence

import torch
from torch import Tensor

from config.schema.config import Config
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.plan import Plan
from torchgrpo.training.device_copy import copy_to_device
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import make_frozen_scorer
from torchgrpo.training.process_setup import prepare_process
from torchgrpo.training.rank_actor import RankProcess
from torchgrpo.training.reference_model import frozen_log_prob
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.sharding import learner_mesh


class ScorerActor(RankProcess):
    """Rank of a copy of the frozen model. `build` must follow `join`."""

    scorer: ResponseScorer

    def build(self, config: Config, plan: Plan) -> bool:
        """Loads the model; returns whether it processes microbatches as packed sequences."""
        device = torch.device("cpu") if plan.devices.on_cpu else torch.device("cuda", 0)
        prepare_process(config, plan.reference.num_threads, device)
        ranks = plan.reference.shard_size
        mesh = learner_mesh(device.type, ranks, ranks) if ranks > 1 else None
        self.scorer = make_frozen_scorer(config, plan, mesh, device)
        # The linear layers may have half-precision weights, for which the plain forward pass needs autocast
        # too.
        autocast = self.scorer.autocast_dtype
        check_forward(self.scorer, plan.reference.prompts, plan.reference.bounds, autocast)
        return self.scorer.packs

    def log_prob(self, microbatches: Sequence[tuple[Tokens, Tensor]]) -> list[Tensor]:
        """Computes log-probs [n, R] of microbatches, each a pair of tokens and temperatures [n, 1]."""
        scored = [frozen_log_prob(self.scorer, tokens, temperature) for tokens, temperature in microbatches]
        return copy_to_device(scored, torch.device("cpu"))
