"""The ChaCha20 key stream (RFC 8439) as 64-bit words, readable from any block: the secure source of random numbers.

On a CPU the blocks are those of the package ``cryptography``; `dpgrad.randomness.secure_kernels` computes the same bits
on a CUDA device.

>>> one, again = (words(bytes(32), block=0, count=2)[1], words(bytes(32), block=1, count=1)[0])
>>> bool((one == again).all())
True
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.errors import OptionError

__all__ = ["BLOCK", "Words", "refuse_missing", "words"]

Words = NDArray[np.uint64]
BLOCK = 8  # words of 64 bits in a block
_BYTES = 8 * BLOCK
_COUNTERS = 1 << 32  # blocks under one nonce
_ZEROS = memoryview(bytes(_BYTES << 14))  # encrypted at a time


def refuse_missing() -> None:
    """Refuse to go on without the package that computes the stream."""
    if find_spec("cryptography") is None:
        raise OptionError("noise secure needs the package cryptography: pip install 'dpgrad[secure]'")


def words(key: bytes, block: int, count: int, out: Words | None = None) -> Words:
    """Blocks ``block`` to ``block + count`` of the stream of a 32-byte key, (count, 8) words, little-endian.

    ``out`` is contiguous memory to write them to.

    The block number is the 32-bit counter of RFC 8439; beyond 2^32 blocks it goes on in the nonce, which is otherwise
    0. A key must therefore serve one stream only: derive it from the run's key with the stream's own name.

    >>> hex(int(words(bytes(32), block=0, count=1)[0, 0]))
    '0x903df1a0ade0b876'
    """
    cipher, algorithm = _package()
    held = np.empty((count, BLOCK), "<u8") if out is None else out
    flat = held.reshape(-1).view(np.uint8).data
    done = 0
    while done < count:
        nonce, counter = divmod(block + done, _COUNTERS)
        many = min(count - done, _COUNTERS - counter)
        start_at = counter.to_bytes(4, "little") + nonce.to_bytes(12, "little")
        stream = cipher(algorithm(key, start_at), None).encryptor()
        for start in range(done * _BYTES, (done + many) * _BYTES, len(_ZEROS)):
            stop = min(start + len(_ZEROS), (done + many) * _BYTES)
            stream.update_into(_ZEROS[: stop - start], flat[start:stop])
        done += many
    return held


@cache
def _package() -> tuple[Any, Any]:
    """The cipher and the algorithm of the package; looked up once, since words are drawn a few thousand at a time."""
    refuse_missing()
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    return Cipher, ChaCha20
