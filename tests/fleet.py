"""Requests to a SuperLink made by hand: right ones, ones that must be refused, and those of an outsider who holds no
more than the public certificate."""

import base64
import datetime
import hashlib
import http.client
import pathlib
import ssl

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import StartRunRequest, UnregisterNodeRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node


def public_bytes(key):
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_of(folder: pathlib.Path):
    return serialization.load_ssh_private_key((folder / "node.key").read_bytes(), None)


def signed(key, age_s=0.0):
    """The headers that prove who asks, made `age_s` seconds ago."""
    at = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)).isoformat()
    signature = key.sign(at.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public_bytes(key)).decode(),
        "flwr-timestamp": at,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


def post(address, path, request, headers, ca=None):
    """The status of the answer; without `ca` no TLS is used."""
    host, _, port = address.partition(":")
    if ca is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
    else:
        context = ssl.create_default_context(cafile=str(ca))
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)
    try:
        body = request.SerializeToString()
        connection.request("POST", path, body, {"content-type": "application/protobuf", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def activate(address, key, headers=None, ca=None):
    request = ActivateNodeRequest(public_key=public_bytes(key), heartbeat_interval=30.0)
    return post(address, "/v1/fleet/activate-node", request, signed(key) if headers is None else headers, ca)


def heartbeat(address, key, node_id, headers=None, ca=None):
    """Say that a node is there."""
    request = SendNodeHeartbeatRequest(node=Node(node_id=node_id), heartbeat_interval=30.0)
    return post(address, "/v1/fleet/send-node-heartbeat", request, signed(key) if headers is None else headers, ca)


def unregister(address, node_id, ca):
    """Take a node off the list, at the control interface."""
    return post(address, "/v1/control/unregister-node", UnregisterNodeRequest(node_id=node_id), {}, ca)


def start_run(address, fab, ca):
    """Submit an app, at the control interface."""
    request = StartRunRequest(fab=Fab(hash_str=hashlib.sha256(fab).hexdigest(), content=fab), user_prompt="go")
    return post(address, "/v1/control/start-run", request, {}, ca)
