# SPDX-License-Identifier: Apache-2.0
"""What one invocation measures, checked. Owns no state."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier.bench.costs import CostModel
from kvtier.bench.drivers.standin import Limits
from kvtier.bench.pattern import Shape
from kvtier.bench.workload import MultiTurn, Source, TraceReplay, TraceRow
from kvtier.errors import ConfigError


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

    def final_tokens(self) -> int:
        """Context of a conversation after its last answer."""
        return self.first_prompt_tokens + self.turns * self.turn_tokens + self.output_tokens

    def source(self, conversations: int) -> Source:
        """A fresh source of requests; equal for equal arguments."""
        if self.workload == "trace":
            return TraceReplay(
                self.trace_rows, self.shape, self.speedup, self.accelerator_tokens, self.seed
            )
        return MultiTurn(
            conversations,
            self.shape,
            first_prompt_tokens=self.first_prompt_tokens,
            turn_tokens=self.turn_tokens,
            turns=self.turns,
            output_tokens=self.output_tokens,
            max_in_flight=self.max_in_flight,
            seed=self.seed,
        )

    def working_set_bytes(self, conversations: int) -> int:
        """KV bytes of everything that is ever computed, once each."""
        if self.workload == "multiturn":
            return conversations * self.final_tokens() * self.shape.token_bytes
        distinct = {block for row in self.trace_rows for block in row.hash_ids}
        answers = sum(row.output_length for row in self.trace_rows)
        return (len(distinct) * 512 + answers) * self.shape.token_bytes

    def check(self) -> None:
        """ConfigError where the parts do not fit together."""
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
