"""Objects inside a message: what fits travels, and a receiver finds the message as it was."""

from flwr.proto.message_pb2 import Message

from hyperbloom.common.enclosed import MOST_ENCLOSED, enclose, take_enclosed


def test_what_is_enclosed_is_taken_out_again_and_the_message_is_as_before() -> None:
    message = Message()
    message.content.SetInParent()
    before = message.SerializeToString()
    enclose(message, [("a", b"1"), ("b", b"22")])
    assert take_enclosed(message) == {"a": b"1", "b": b"22"}
    assert message.SerializeToString() == before


def test_a_message_with_an_error_has_no_content_afterwards() -> None:
    message = Message()
    message.error.code = 2
    enclose(message, [("a", b"1")])
    assert take_enclosed(message) == {"a": b"1"}
    assert not message.HasField("content") and message.error.code == 2


def test_what_is_too_large_or_not_there_stays_out_and_the_rest_goes_in() -> None:
    message = Message()
    large = bytes(MOST_ENCLOSED)
    enclose(message, [("small", b"1"), ("large", large), ("missing", b""), ("other", b"2")])
    assert take_enclosed(message) == {"small": b"1", "other": b"2"}
    enclose(message, [("large", large)])
    assert take_enclosed(message) == {"large": large}
