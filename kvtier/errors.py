# SPDX-License-Identifier: Apache-2.0
"""The one error tree of kvtier.

A miss is a return value; a failure is never reported as one. Foreign exceptions (OSError, client
libraries) are mapped onto these classes at the edge of the tier that met them, ``from exc``.
"""


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """Wrong configuration or wrong use; the message says what to type instead."""


class ClosedError(KVTierError):
    """The object was closed by its user."""


class TierLostError(KVTierError):
    """A tier, a peer or the service broke; the caller goes on without it."""


class PeerLostError(TierLostError):
    """A peer broke, which says nothing about other peers of its tier."""


class InternalError(KVTierError):
    """An invariant of kvtier does not hold; always a bug of kvtier."""
