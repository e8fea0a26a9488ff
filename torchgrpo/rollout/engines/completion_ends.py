"""Finds the token that ends a completion: end token, stop string or length limit.

Every engine finds stop strings here, so all engines cut at the same token. A completion keeps the whole token that
completes a stop string. It is a prefix of what the engine would have sampled, so its log-probs stay exact.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from envs.group import FinishReason, Sampling
from torchgrpo.rollout.engines.interface import Request

_PARTIAL_CHARACTER = "\ufffd"
"""Decoded text of bytes that are only a part of a character."""


class CompletionEnds:
    """Finish reasons of completions, token by token.

    Args:
        end_token_ids: any of these ends a completion.
        tokenizer: decodes tokens for stop strings; None if no request has any.
    """

    def __init__(self, end_token_ids: Collection[int], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.end_token_ids = frozenset(end_token_ids)
        self._tokenizer = tokenizer
        self._vocabulary = frozenset() if tokenizer is None else frozenset(tokenizer.get_vocab().values())
        self._token_texts: dict[int, str] = {}

    def check_request(self, request: Request) -> None:
        """Raises ValueError if the request has stop strings and no tokenizer can find them."""
        if request.sampling.stop and self._tokenizer is None:
            raise ValueError(
                f"request {request.request_id}: the engine has no tokenizer to find stop={request.sampling.stop}"
            )

    def finish_reason(self, token_ids: Sequence[int], sampling: Sampling) -> FinishReason:
        """Returns why a completion ends with its last token; "abort" if it does not end."""
        if token_ids[-1] in self.end_token_ids or (sampling.stop and self._completes_stop(token_ids, sampling.stop)):
            return "stop"
        return "length" if len(token_ids) >= sampling.max_tokens else "abort"

    def _completes_stop(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last token completes a stop string in the decoded text.

        The text includes control tokens. Most tokens lack the last character of every stop string, as the text of the
        token alone shows.
        """
        text = self._token_text(token_ids[-1])
        if _PARTIAL_CHARACTER not in text and not any(string[-1] in text for string in stop):
            return False
        # Each token adds at least one byte. One more token, since the decoded text may lose its first space.
        num_tokens = max(len(string.encode()) for string in stop) + 1
        text = self._decode(token_ids[-num_tokens:])
        return any(string in text for string in stop)

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            # The token is decoded twice in a row, since the text may lose its first space.
            self._token_texts[token] = self._decode((token, token))
        return self._token_texts[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens, without ids that the tokenizer does not have."""
        assert self._tokenizer is not None
        known = [token for token in token_ids if token in self._vocabulary]
        text = self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
