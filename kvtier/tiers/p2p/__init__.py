# SPDX-License-Identifier: Apache-2.0
"""The peer tier: chunks from the host memory of other instances."""
