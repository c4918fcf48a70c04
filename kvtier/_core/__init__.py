# SPDX-License-Identifier: Apache-2.0
"""Compiled parts. A missing one is an ImportError that names the build command."""
