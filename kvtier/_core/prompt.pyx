# SPDX-License-Identifier: Apache-2.0
"""Answers about a prompt that were found at once and are asked for chunk by chunk.

A model server asks for each of a prompt's chunks with a call of its own, and then where each came
from: two thousand calls for a long prompt, each of which has to say no more than "as the last one".
One thread at a time; owns references only.
"""

from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject


cdef class PromptAnswers:
    """See the stub."""

    cdef object request  # whose chunks `ready` are; None: nothing is known
    cdef list ready      # chunks that are there, in the order of the questions
    cdef Py_ssize_t at   # position of the next one
    cdef object asker    # whose sources `sources` are; None: nobody's
    cdef dict sources    # tier of each of its chunks that came from one
    cdef object hit, host
    cdef list places     # by tier

    def __init__(self, hit, host, places) -> None:
        self.hit, self.host, self.places = hit, host, list(places)
        self.ready = []
        self.sources = {}

    @property
    def prompt(self):
        """The request whose answers are kept."""
        return self.request

    def keep(self, request, list ready) -> None:
        """From now on these are the answers for `request`, from the first one on."""
        self.request, self.ready, self.at = request, ready, 0

    def forget(self) -> None:
        """They may be wrong from now on."""
        self.request, self.ready, self.at = None, [], 0

    def keep_sources(self, request, dict sources) -> None:
        """Where the chunks of `request` came from."""
        self.asker, self.sources = request, sources

    def forget_sources(self) -> None:
        """The request has ended."""
        self.asker, self.sources = None, {}

    def lookup(self, key, req_context):
        """Whether a chunk is there: the next one that is known to be, or as `_look` says."""
        cdef object known
        if req_context is self.request and self.at < PyList_GET_SIZE(self.ready):
            known = <object> PyList_GET_ITEM(self.ready, self.at)
            if known is key or known == key:
                self.at += 1
                return self.hit
        return self._look(key, req_context)

    def again(self, key) -> bool:
        """Whether the questions start anew, with `key`: it is the first one, and answered now."""
        if not self.ready or self.ready[0] != key:
            return False
        self.at = 1
        return True

    def get_load_source(self, key, req_context):
        """Where a chunk that is there came from."""
        cdef PyObject *tier
        if req_context is not self.asker:
            self._find_sources(req_context)
        tier = PyDict_GetItemWithError(self.sources, key)
        return self.host if tier is NULL else self.places[<object> tier]
