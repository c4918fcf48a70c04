# SPDX-License-Identifier: Apache-2.0
"""What one invocation measures, checked. Owns no state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvtier.bench.costs import CostModel
from kvtier.bench.drivers.standin import Limits
from kvtier.bench.pattern import Shape
from kvtier.bench.workload import MultiTurn, Source, TraceReplay, TraceRow
from kvtier.errors import ConfigError


class RealEngine(msgspec.Struct, frozen=True):
    """vLLM, in a process of this run or behind a URL."""

    model: str | None = None
    base_url: str | None = None
    accelerator_bytes: int | None = None
    """None: what vLLM takes by itself."""
    block_tokens: int | None = None
    blocks_per_chunk: int = 1
    policy: str = "lru"
    isolation: str = "process"
    lookup_timeout_seconds: float = 10.0
    engine_args: dict[str, Any] = {}
    """Arguments of vLLM's ``LLM``; they win."""


class Settings(msgspec.Struct, frozen=True):
    """All that the runner needs; sizes in bytes."""

    workload: str
    strategies: tuple[str, ...]
    shape: Shape
    costs: CostModel
    limits: Limits
    accelerator_bytes: int
    host_bytes: int
    conversations: tuple[int, ...]
    first_prompt_tokens: int
    turn_tokens: int
    turns: int
    output_tokens: int
    max_in_flight: int
    seed: int
    trace_rows: tuple[TraceRow, ...] = ()
    speedup: float = 1.0
    inject: str | None = None
    tier_parent: Path = Path(".")
    tier_file_system: str = "unknown"
    output: Path = Path("bench-results")
    engine: str = "standin"
    real: RealEngine | None = None
    """What stands in the place of shape, costs, limits and the accelerator, if it is no stand-in.
    """
    repeats: int = 3
    repeat_below_seconds: float = 4.0
    """Points at which a strategy takes less than this are measured `repeats` times."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the accelerator."""
        return self.accelerator_bytes // self.shape.block_bytes

    @property
    def accelerator_tokens(self) -> int:
        """Tokens that the accelerator holds."""
        return self.num_blocks * self.shape.block_tokens

    def points(self) -> list[int]:
        """The sweep: numbers of conversations, or [0] for a trace."""
        return list(self.conversations) if self.workload == "multiturn" else [0]

    @staticmethod
    def point_name(conversations: int) -> str:
        """A point of the sweep as it is told to people."""
        return f"{conversations} conversations" if conversations else "trace"

    def final_tokens(self) -> int:
        """Context of a conversation after its last answer."""
        return self.first_prompt_tokens + self.turns * self.turn_tokens + self.output_tokens

    def source(
        self, conversations: int, max_tokens: int | None = None, seed: int | None = None
    ) -> Source:
        """A fresh source of requests; equal for equal arguments.

        Parameters
        ----------
        conversations : int
        max_tokens : int, optional
            Longest context; what the stand-in accelerator holds if not given.
        seed : int, optional
            Another one than that of the settings.
        """
        seed = self.seed if seed is None else seed
        if self.workload == "trace":
            tokens = self.accelerator_tokens if max_tokens is None else max_tokens
            return TraceReplay(self.trace_rows, self.shape, self.speedup, tokens, seed)
        return MultiTurn(
            conversations,
            self.shape,
            first_prompt_tokens=self.first_prompt_tokens,
            turn_tokens=self.turn_tokens,
            turns=self.turns,
            output_tokens=self.output_tokens,
            max_in_flight=self.max_in_flight,
            seed=seed,
        )

    def working_set_tokens(self, conversations: int) -> int:
        """Tokens of everything that is ever computed, once each."""
        if self.workload == "multiturn":
            return conversations * self.final_tokens()
        distinct = {block for row in self.trace_rows for block in row.hash_ids}
        answers = sum(row.output_length for row in self.trace_rows)
        return len(distinct) * 512 + answers

    def working_set_bytes(self, conversations: int) -> int:
        """Its KV bytes in the stand-in accelerator."""
        return self.working_set_tokens(conversations) * self.shape.token_bytes

    def check(self) -> None:
        """ConfigError where the parts do not fit together. A real engine knows by itself."""
        if self.real is not None:
            return
        if self.accelerator_bytes < 4 * self.shape.chunk_bytes:
            raise ConfigError(
                f"--accelerator {self.accelerator_bytes} bytes is less than four chunks of "
                f"{self.shape.chunk_bytes}"
            )
        if self.host_bytes < 4 * self.shape.chunk_bytes:
            raise ConfigError(
                f"--host-memory {self.host_bytes} bytes is less than four chunks of "
                f"{self.shape.chunk_bytes}"
            )
        if self.workload == "multiturn" and self.final_tokens() > self.accelerator_tokens:
            raise ConfigError(
                f"a conversation grows to {self.final_tokens()} tokens and the accelerator holds "
                f"{self.accelerator_tokens}: raise --accelerator, or lower --turns, --turn-tokens "
                "or --first-prompt-tokens"
            )
