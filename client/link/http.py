"""Flower's Fleet API over HTTP, which is all that SuperLinks offer from flwr 1.40 on, behind gRPC's interface.

A call over HTTP is `POST /v1/fleet/pull-messages` with the very message that gRPC would carry. So here is a channel for
Flower's gRPC stub, and its errors are gRPC's: nothing else of the client knows what carries its calls.
"""

import re
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import httpx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from hyperbloom.client.link.server import Link

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    **dict.fromkeys((408, 502, 503, 504), grpc.StatusCode.UNAVAILABLE),
}


class HttpError(grpc.RpcError):  # type: ignore[misc]
    """A call that failed, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = lambda: code, lambda: details


class HttpChannel:
    """Carries the calls of a stub in HTTP requests over connections that stay open.

    `patience` is the most seconds until bytes come or go, for calls without a limit of their own.
    """

    def __init__(self, link: Link, patience: float) -> None:
        self._url = f"{'http' if link.insecure else 'https'}://{link.address}/v1/fleet/"
        trusted = False if link.insecure else ssl.create_default_context(cafile=link.root_certificates)
        # uvicorn, which serves Flower's API, closes a connection that was silent for 5 s.
        self._client = httpx.Client(verify=trusted, timeout=patience, limits=httpx.Limits(keepalive_expiry=4.0))

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Any]:
        """Return a function that makes a call of a method, such as `/flwr.proto.Fleet/PullMessages`."""
        words = re.findall("[A-Z][a-z]+", method.rpartition("/")[2])
        url = self._url + "-".join(words).lower()

        def call(request: Any, timeout: float | None, metadata: Iterable[tuple[str, str | bytes]]) -> Any:
            headers = {  # gRPC marks bytes by the end of their name
                name.removesuffix("-bin"): b64encode(value).decode() if isinstance(value, bytes) else value
                for name, value in metadata
            }
            headers["content-type"] = headers["accept"] = "application/protobuf"
            limits = {} if timeout is None else {"timeout": timeout}
            content = self._post(url, content=request_serializer(request), headers=headers, **limits)
            try:
                return response_deserializer(content)
            except DecodeError:  # as from the page of a hotel's network
                raise HttpError(grpc.StatusCode.UNAVAILABLE, "what answers is no SuperLink") from None

        return call

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, url: str, **request: Any) -> bytes:
        try:
            response = self._client.post(url, **request)
        except httpx.RequestError as error:
            other = isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error)  # no HTTP
            code = grpc.StatusCode.UNIMPLEMENTED if other else grpc.StatusCode.UNAVAILABLE
            raise HttpError(code, str(error) or type(error).__name__) from None
        except RuntimeError as error:  # the channel was closed
            raise HttpError(grpc.StatusCode.CANCELLED, str(error)) from None
        if response.is_success:
            return response.content
        code = _CODES.get(response.status_code, grpc.StatusCode.UNKNOWN)
        raise HttpError(code, f"{response.status_code} {response.text}")
