# SPDX-License-Identifier: Apache-2.0
"""The digest of everything that must agree before bytes may be shared.

Owns no state. Any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_TAG = b"kvtier-namespace-1"


def namespace_digest(fields: Mapping[str, str]) -> bytes:
    """SHA-256 over the fields of a namespace, tagged and length-prefixed.

    Parameters
    ----------
    fields : mapping of str to str
        Resolved values only; their order does not matter.

    Returns
    -------
    bytes
        32 bytes. Two sets of fields have the same digest only if they are equal.
    """
    digest = hashlib.sha256(_TAG)
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            digest.update(len(part).to_bytes(4, "big"))
            digest.update(part)
    return digest.digest()
