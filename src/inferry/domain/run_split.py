"""Which runs a trial of settings takes."""

from hashlib import blake2b

from msgspec import Struct


class RunSplit(Struct, frozen=True):
    """Takes the fraction `share` of all runs. A run is taken or not for as long as salt and share stay the same; with
    a larger share and the same salt, the runs that were taken before are taken too.
    """

    salt: str
    share: float

    def takes(self, tenant: str, run_id: str) -> bool:
        digest = blake2b(f"{self.salt}\0{tenant}\0{run_id}".encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64
