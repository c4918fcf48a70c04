# SPDX-License-Identifier: Apache-2.0
"""Answers about a prompt that were found at once and are asked for chunk by chunk."""

from collections.abc import Sequence
from typing import Any

class PromptAnswers:
    """Base of a manager that looks a whole prompt up at the first question about it.

    A subclass has `_look(key, request)`, for what is not known here, and `_find_sources(request)`,
    which calls `keep_sources`. Requests are told apart by identity.

    Parameters
    ----------
    hit : object
        Answer for a chunk that is there.
    host : object
        Source of a chunk that came from no tier.
    places : sequence of object
        Sources of the others, by tier.
    """

    def __init__(self, hit: Any, host: Any, places: Sequence[Any]) -> None: ...
    @property
    def prompt(self) -> Any:
        """The request whose answers are kept; None: nobody's."""
    def keep(self, request: Any, ready: list[bytes]) -> None:
        """From now on the chunks `ready` of `request` are there; they are asked for in that order.

        Until `forget`, which has to be called before anything of it may be wrong.
        """
    def forget(self) -> None:
        """They may be wrong from now on."""
    def keep_sources(self, request: Any, sources: dict[bytes, int]) -> None:
        """Tiers that chunks of `request` came from; the dictionary may go on being filled."""
    def forget_sources(self) -> None:
        """The request has ended."""
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """`hit` if `key` is the next chunk that is there, else what `_look` says."""
    def again(self, key: bytes) -> bool:
        """Whether the questions start anew, with `key`: it is the first one, and answered now."""
    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Where a chunk that is there came from."""
