"""The sockets of a process that lead to other machines: links, streams, tunnels, and what listens.

    loop        one thread, and what listens
    connection  bytes in and out, silence, ends
    links       links between machines: two connections each, and one thread that sends for all of them
    tunnels     gRPC's connections, carried over connections of a port
    call_room   what their calls take at the controller, while they are under way
    callers     those who call, until it is known who they are: one more thread for each port

A process has one `Loop` for those who are in. A host has one for each lane and direction of its streams, because TLS
keeps a core busy. Nothing outside this room waits for a socket of another machine, except who opens a connection
(`pathways/trust/dialing.py`, `pathways/host/stream_sockets.py`).
"""

#: An end that has nothing to say says so at least this often, in seconds.
HEARTBEAT_S = 1.0
#: Who has not answered a heartbeat for this long, in seconds, counts as gone.
ANSWER_S = 3.5
#: An end of which nothing was heard for this long, in seconds, counts as gone.
SILENCE_S = HEARTBEAT_S + ANSWER_S
#: A stream of which the other end has taken nothing for this long, in seconds, counts as broken, although that end may
#: live: the kernel sends lost packets again at ever longer intervals. A machine that is gone is known by its link.
TAKES_NOTHING_S = 4 * SILENCE_S
