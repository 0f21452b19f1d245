"""The door: an IFRT proxy server, so that unmodified JAX is a client (`JAX_PLATFORMS=proxy`).

    server.py              the gRPC service; a thin transport, which another one can replace
    session.py             one client: its requests in order, its replies
    *_requests.py          what a session does at each kind of request
    arrays.py, handles.py  what a session has: arrays as views of buffers, handles of the client and of ours
    behind.py              what lies behind the door, as a protocol: devices, buffers, executables

A session belongs to one thread, which handles its requests. What lies behind the door answers from any thread.
"""
