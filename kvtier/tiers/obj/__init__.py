# SPDX-License-Identifier: Apache-2.0
"""The object tier: chunks in an S3-compatible store."""
