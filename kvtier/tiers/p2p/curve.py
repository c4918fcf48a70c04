# SPDX-License-Identifier: Apache-2.0
"""CURVE: one key of the whole group, with which all messages are encrypted.

Runs on the service's loop. Owns the authenticator of one context, from ``start`` to ``stop``.
"""

from __future__ import annotations

import zmq
import zmq.asyncio
import zmq.auth.asyncio

from kvtier.errors import ConfigError


class Curve:
    """Only those that have the key are let in, and talked to.

    Parameters
    ----------
    secret_key : str
        40 characters of Z85.

    Raises
    ------
    ConfigError
        It is no key.
    """

    def __init__(self, secret_key: str) -> None:
        self._secret = secret_key.encode()
        try:
            self._public = zmq.curve_public(self._secret)
        except zmq.ZMQError as exc:
            raise ConfigError(
                "curve_secret_key is no key of CURVE; make one with "
                'python -c "import zmq; print(zmq.curve_keypair()[1].decode())"'
            ) from exc
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None

    def start(self, context: zmq.asyncio.Context) -> None:
        """Judge whoever comes to a socket of `context`."""
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def stop(self) -> None:
        """Judge nobody any more. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key`, in Z85, is the one; the authenticator asks."""
        return key == self._public

    def secure_server(self, socket: zmq.asyncio.Socket) -> None:
        """Before it is bound."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True

    def secure_client(self, socket: zmq.asyncio.Socket) -> None:
        """Before it is connected."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_serverkey = self._public
