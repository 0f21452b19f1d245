"""Types of `usual_requests.pyx`, where every name is described."""

from pathways.proxy.arrays import Array
from pathways.proxy.handles import HandleTable
from pathways.proxy.loaded import Loaded
from pathways.proxy.replies import Replies

class UsualRequests:
    """Handles the requests of a usual step. A session's thread alone calls it."""

    def __init__(self, arrays: HandleTable[Array], executables: HandleTable[Loaded], replies: Replies) -> None: ...
    def handle(self, raw: bytes) -> bytes | None: ...
