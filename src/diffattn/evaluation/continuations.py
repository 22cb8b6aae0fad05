"""A context that is read once and continued many times."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffattn.evaluation.caches import with_cache


class ReadContext:
    """Keys and values of a context in a cache; each continuation is taken out again.

    Args:
        model: a causal language model of Hugging Face's interface, in evaluation mode.
        ids: [L] tokens of the context.
    """

    @torch.no_grad()
    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.model = model
        self.cache: Any = DynamicCache(config=model.config)
        # layers with a window forget what they need to go back to, unless they are told
        getattr(self.cache, "activate_past_recording", lambda: None)()
        model(
            input_ids=self._tensor(ids),
            logits_to_keep=1,
            **with_cache(model, self.cache),
        )

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(list(ids), device=self.model.device)[None]

    @torch.no_grad()
    def extend(self, ids: Sequence[int]) -> Tensor:
        """Read tokens behind the context and keep them.

        Args:
            ids: [n] tokens.

        Returns:
            [n, vocabulary] logits of the tokens that follow each.
        """
        found = self.model(input_ids=self._tensor(ids), **with_cache(self.model, self.cache))
        return found.logits[0].float()

    def take_back(self, count: int) -> None:
        """Forget so many of the last tokens."""
        self.cache.crop(-count)

    def scores(self, ids: Sequence[int], answers: Sequence[Sequence[int]]) -> list[float]:
        """Log-probability of each answer behind a prompt.

            score(a) = sum_i log p(a_i | context, prompt, a_1 .. a_{i-1})

        Args:
            ids: tokens of the prompt, at least one.
            answers: tokens of each.
        """
        found = []
        start = self.extend(ids)[-1:]
        for answer in answers:
            logits = start
            if len(answer) > 1:
                logits = torch.cat((start, self.extend(answer[:-1])))
                self.take_back(len(answer) - 1)
            wanted = self._tensor(answer)[0, :, None]
            found.append(logits.log_softmax(-1).gather(1, wanted).double().sum().item())
        self.take_back(len(ids))
        return found

    def greedy(
        self, ids: Sequence[int], most: int, stops: Sequence[int], draft: Sequence[int] = ()
    ) -> list[int]:
        """The most likely continuation of a prompt, token by token.

        Args:
            ids: tokens of the prompt, at least one.
            most: tokens at most.
            stops: tokens that end it; they are not returned.
            draft: a guess; read in one pass and kept as far as it is what the model says, so it
                changes the time alone.

        Returns:
            The tokens; `most` of them where no stop came.
        """
        logits, read, found = self.extend(ids), len(ids), list[int]()
        draft = list(draft[:most])
        if draft:
            followed = torch.cat((logits[-1:], self.extend(draft)))
            said = followed.argmax(-1).tolist()
            good = 0
            while good < len(draft) and said[good] == draft[good] and draft[good] not in stops:
                good += 1
            if good < len(draft):
                self.take_back(len(draft) - good)
            found, logits, read = draft[:good], followed[good : good + 1], read + good
        while len(found) < most:
            token = int(logits[-1].argmax())
            if token in stops:
                break
            found.append(token)
            if len(found) < most:
                logits, read = self.extend([token]), read + 1
        self.take_back(read)
        return found
