"""Tests which addresses are valid and when DNS names are resolved."""

import socket

import pytest
from logprobd import InvalidArgument
from logprobd.addresses import AddressBook, dns_name, parse_addresses, record_addresses


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("scorer", ("scorer:8470",)),
        ("a:1,b:2", ("a:1", "b:2")),
        (" a:1 , b ", ("a:1", "b:8470")),
        (["a:1", "unix:///x,y"], ("a:1", "unix:///x,y")),
        ("a:1,b:2,a:1", ("a:1", "b:2")),
        ("[::1]:2,[fe80::1]", ("[::1]:2", "[fe80::1]:8470")),
        ("unix:/run/l.sock,h:1", ("unix:/run/l.sock", "h:1")),
        ("dns:///scorer", ("dns:///scorer:8470",)),
        ("dns:///scorer:3,x:1", ("dns:///scorer:3", "x:1")),
    ],
)
def test_addresses_are_normalised(given, used):
    assert parse_addresses(given) == used


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("a:1,", "an address is missing"),
        ([], "name a server"),
        ("::1:8470", "brackets"),
        ("dns:///::1:3", "brackets"),
        ("http://a:1", "host:port"),
        ("dns:///", "dns:///name:port"),
        ("a:http", "not a number"),
        ([3], "pass a str"),
    ],
)
def test_bad_addresses_say_what_to_write(given, advice):
    with pytest.raises(InvalidArgument, match=advice) as caught:
        parse_addresses(given)

    assert caught.value.field == "address"


def test_a_name_is_split_into_host_and_port():
    assert dns_name("dns:///scorer.ns:3") == ("scorer.ns", 3)
    assert dns_name("dns:///[::1]:3") == ("::1", 3)
    assert dns_name("scorer:3") is None


def test_records_of_both_families_are_servers():
    v4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 3))
    v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 3, 0, 0))

    assert record_addresses([v6, v4, v4], 3) == ("10.0.0.2:3", "[fd00::1]:3")


def test_names_are_looked_up_every_30_seconds_and_soon_after_a_failure():
    book = AddressBook(["dns:///scorer:3"])
    assert book.take_due(100.0, failed_at=float("-inf"))
    book.update({"dns:///scorer:3": ("10.0.0.1:3",)})

    assert not book.take_due(129.0, failed_at=float("-inf"))
    assert book.take_due(130.0, failed_at=float("-inf"))
    assert not book.take_due(130.9, failed_at=130.5)
    assert book.take_due(131.0, failed_at=130.5)
    assert not book.take_due(133.0, failed_at=130.5)


def test_a_name_without_records_is_looked_up_again_after_a_second():
    book = AddressBook(["dns:///scorer:3"])
    assert book.take_due(100.0, failed_at=0.0)
    book.update({"dns:///scorer:3": OSError("unknown name")})

    assert book.servers() == ()
    assert book.errors == ["dns:///scorer:3: unknown name"]
    assert not book.take_due(100.9, failed_at=0.0)
    assert book.take_due(101.0, failed_at=0.0)


def test_a_failed_look_up_keeps_the_last_records():
    book = AddressBook(["a:1", "dns:///scorer:3"])
    book.update({"dns:///scorer:3": ("10.0.0.1:3", "a:1")})

    assert book.update({"dns:///scorer:3": OSError("timed out")}) == ("a:1", "10.0.0.1:3")


def test_a_function_is_looked_up_in_place_of_addresses():
    book = AddressBook(["<servers>"], lambda: ["a", "b:1"])
    assert not book.is_plain
    assert book.servers() == ()
    (look_up,) = book.look_ups.values()

    assert book.update({"<servers>": look_up()}) == ("a:8470", "b:1")
    assert book.update({"<servers>": RuntimeError("no cluster")}) == ("a:8470", "b:1")
    assert book.errors == ["<servers>: no cluster"]


def test_only_one_plain_address_means_a_single_server():
    assert AddressBook(["a:1"]).is_plain
    assert not AddressBook(["a:1", "b:1"]).is_plain
    assert not AddressBook(["dns:///a:1"]).is_plain
