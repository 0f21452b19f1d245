"""CERT-6: a name belongs to the key that had it first, until the operator makes a token for the name."""

from __future__ import annotations

import os
import pathlib
import time

import pytest
from trust_cases import Controller

from pathways import errors
from pathways.trust import Credentials, Role, Tokens, dial, join, renewed_at
from pathways.trust import tokens as tokens_module
from pathways.trust.joining import certificate_in
from pathways.trust.tokens import is_name_of


def host(controller: Controller, name: str, **how: str) -> Credentials:
    return join(controller.address, controller.tokens.make(Role.HOST, 60), name, **how)


def test_a_second_token_does_not_get_a_machine_s_name(controller: Controller) -> None:
    first = host(controller, "m0")
    token = controller.tokens.make(Role.HOST, 60)
    with pytest.raises(errors.PermissionDeniedError, match=r"'m0' belongs to another machine.*--role host --name m0"):
        join(controller.address, token, "m0")
    assert join(controller.address, token, "m1").name == "m1", "no use of the token was spent"
    dial(controller.address, first, "link").close()
    assert join(controller.address, controller.tokens.make(Role.CLIENT, 60), "m0").name == "m0", "of another role"


def test_one_use_is_one_name(controller: Controller) -> None:
    """CERT-3: also of one key."""
    token = controller.tokens.make(Role.HOST, 60)
    first = join(controller.address, token, "m0")
    with pytest.raises(errors.PermissionDeniedError, match="token 1 was used 1 of 1 times"):
        join(controller.address, token, "m1", key=first.key)
    assert join(controller.address, token, "m0", key=first.key).name == "m0", "its answer was lost"
    assert host(controller, "m1").name == "m1", "nobody has squatted it"


def test_a_machine_comes_again_by_its_key(controller: Controller, tmp_path: pathlib.Path) -> None:
    """With another token, when its certificate has expired or not; its file has the key."""
    path = str(tmp_path / "own.pem")
    first = certificate_in(path, controller.address, controller.tokens.make(Role.HOST, 60), "m0", "host")
    again = certificate_in(path, controller.address, controller.tokens.make(Role.HOST, 60), "m0", "host")
    assert again.key == first.key and again.identity.token == 2
    renewed_at(controller.address, again).save(path)  # a new key, to which the name goes over
    third = certificate_in(path, controller.address, controller.tokens.make(Role.HOST, 60), "m0", "host")
    assert third.key != first.key
    dial(controller.address, third, "link").close()


def test_a_renewal_whose_answer_is_lost_loses_no_name(controller: Controller) -> None:
    first = host(controller, "m0")
    renewed_at(controller.address, first)  # nobody keeps it
    second = renewed_at(controller.address, first)
    for own in (first, second):
        dial(controller.address, own, "link").close()
    renewed_at(controller.address, first)
    host(controller, "m0", key=first.key)


def test_the_operator_gives_a_name_to_another_machine(controller: Controller) -> None:
    """Who had it comes in no more, and does not get it back."""
    first = host(controller, "m0")
    token = controller.tokens.make(Role.HOST, 60, name="m0")
    with pytest.raises(errors.PermissionDeniedError, match="token 2 is for the name 'm0' alone"):
        join(controller.address, token, "m1")
    second = join(controller.address, token, "m0")
    dial(controller.address, second, "link").close()
    for call in (lambda: dial(controller.address, first, "link"), lambda: renewed_at(controller.address, first)):
        with pytest.raises(errors.PermissionDeniedError, match="'m0' belongs to another host now"):
            call()
    with pytest.raises(errors.PermissionDeniedError, match="belongs to another machine"):
        host(controller, "m0", key=first.key)
    with pytest.raises(errors.PermissionDeniedError, match="was used 1 of 1"):
        join(controller.address, token, "m0")
    controller.tokens.make(Role.HOST, 60, name="m0")
    dial(controller.address, second, "link").close()  # the name is its own until the token is traded


def test_who_lost_a_name_does_not_take_it_back_by_its_old_token(controller: Controller) -> None:
    """Neither by the token for the name that it has traded before, nor by one that was made before the new owner's."""
    old, unused = (controller.tokens.make(Role.HOST, 60, name="m0") for _ in range(2))
    evicted = join(controller.address, old, "m0")
    assert join(controller.address, old, "m0", key=evicted.key).name == "m0", "its answer was lost"
    owner = join(controller.address, controller.tokens.make(Role.HOST, 60, name="m0"), "m0")
    owner = renewed_at(controller.address, owner)
    for token, key in ((old, evicted.key), (unused, evicted.key), (unused, "")):
        with pytest.raises(errors.PermissionDeniedError, match="'m0' belongs to another machine of this cluster"):
            join(controller.address, token, "m0", key=key)
    dial(controller.address, owner, "link").close()
    twice = controller.tokens.make(Role.CLIENT, 60, uses=2, name="c")
    first = join(controller.address, twice, "c")
    join(controller.address, twice, "c")
    with pytest.raises(errors.PermissionDeniedError, match="'c' belongs to another client of this cluster"):
        join(controller.address, twice, "c", key=first.key)


def test_a_part_of_a_key_is_no_proof(controller: Controller) -> None:
    """Eight digits of a key can be hit by trying four milliards; the name that has them is its owner's all the same."""
    tokens, owner = controller.tokens, "01234567" + "a" * 56
    token = tokens.make(Role.CLIENT, 60)
    tokens.take_for(token, "first", "u", "f" * 64)
    assert tokens.take_for(token, "owner", "u", owner).name == "u.01234567"
    with pytest.raises(errors.PermissionDeniedError, match=r"'u.01234567' as well, by others with other keys"):
        tokens.take_for(tokens.make(Role.CLIENT, 60), "forger", "u", "01234567" + "b" * 56)
    assert tokens.take_for(token, "owner", "u", owner).name == "u.01234567", "and the owner comes again"


def test_a_client_gets_a_name_of_its_own(controller: Controller, tmp_path: pathlib.Path) -> None:
    """Programs on many machines have one token, and may have the same user and machine name."""
    token, wanted = controller.tokens.make(Role.CLIENT, 60), "u-trainer"
    paths = [str(tmp_path / f"{number}.pem") for number in range(3)]
    names = [certificate_in(path, controller.address, token, wanted, "client").name for path in paths]
    assert names[0] == wanted and len(set(names)) == 3 and all(is_name_of(name, wanted) for name in names)
    for path, name in zip(paths, names, strict=True):  # and keeps it
        assert certificate_in(path, controller.address, token, wanted, "client").name == name
        os.unlink(path)
    longest = "n" * 64
    assert [len(join(controller.address, token, longest).name) for _ in range(2)] == [64, 64]


def test_names_survive_the_controller(controller: Controller) -> None:
    host(controller, "m0")
    again = Tokens(controller.authority.folder)
    with pytest.raises(errors.PermissionDeniedError, match="belongs to another machine"):
        again.take_for(again.make(Role.HOST, 60), "k", "m0", "another key")


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "..", "pathways1.x"])
def test_a_token_for_no_name(controller: Controller, name: str) -> None:
    if name:
        with pytest.raises(errors.OptionError, match="a name is 1 to 64 letters"):
            controller.tokens.make(Role.HOST, 60, name=name)
    else:
        assert controller.tokens.list() == []


def test_names_of_clients_do_not_add_up(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token lets in any number of them. Machines come in all the same, and keep their names."""
    now = [time.time()]
    tokens = Tokens(controller.authority.folder, lambda: now[0])
    monkeypatch.setattr(tokens_module, "_MOST_NAMES", 5)
    flood = tokens.make(Role.CLIENT, 3600)
    machine = tokens.take_for(tokens.make(Role.HOST, 3600), "k", "m0", "key of m0")
    for number in range(5):
        tokens.take_for(flood, f"k{number}", "c", f"{number}" * 64)
    with pytest.raises(errors.PermissionDeniedError, match="5 names came in by token 1, which is the most"):
        tokens.take_for(flood, "k9", "another", "9" * 64)
    other = tokens.make(Role.CLIENT, 3600)
    assert tokens.take_for(other, "o", "other", "o" * 64).name == "other", "who has another token comes in"
    assert tokens.take_for(flood, "k0", "c", "0" * 64).name == "c", "who is known comes again"
    assert tokens.take_for(tokens.make(Role.HOST, 3600), "k", "m1", "key of m1").name == "m1"
    tokens.revoke(1)
    honest = tokens.make(Role.CLIENT, 30 * 24 * 3600)
    assert tokens.take_for(honest, "a", "c", "a" * 64).name == "c", "the flood's names are free again"
    now[0] += 8 * 24 * 3600
    assert tokens.take_for(honest, "b", "c", "b" * 64).name == "c", "its owner was away for a week"
    with pytest.raises(errors.PermissionDeniedError, match="belongs to another machine"):
        tokens.take_for(tokens.make(Role.HOST, 3600), "k", machine.name, "another key")
