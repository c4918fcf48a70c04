# SPDX-License-Identifier: Apache-2.0
"""A module of other people that fails while it loads."""

WRONG = 1 / 0
