"""Collectives, and their seconds on the links that each mesh axis has. Numbers may be arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slicewise.costs.device import Device
from slicewise.costs.layout import Number
from slicewise.costs.torus import AxisLinks

CORE_LINKS = 6  # the link between the two devices of one chip, in ICI links

Op = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


@dataclass(frozen=True)
class Network:
    """Of each ICI axis: the ``links`` of a chip that a collective over it keeps busy, the longest way in
    ``hops``, and whether it ``joins`` the devices of one chip."""

    device: Device
    links: Mapping[str, Number]
    hops: Mapping[str, Number]
    joins: Mapping[str, Number]

    @property
    def link_bytes_per_s(self) -> float:
        """One link, one way."""
        return self.device.link_bytes_per_s * self.device.calibration.ici_efficiency

    def group(self, degrees: Mapping[str, Number]) -> tuple[Number, Number, Number]:
        """Size, bytes/s per device and latency of a collective over the axes of ``degrees`` at once.

        Devices of one chip share its links unless the group joins them; a group inside one chip has the link
        between its devices.
        """
        size: Number = 1
        links: Number = 0.0
        hops: Number = 0.0
        joins: Number = False
        for axis, degree in degrees.items():
            size = size * degree
            links = links + np.where(degree > 1, self.links[axis], 0.0)
            hops = hops + np.where(degree > 1, self.hops[axis], 0.0)
            joins = joins | ((degree > 1) & self.joins[axis])
        if not self.device.torus:
            links = np.minimum(links, 1.0)  # a switch gives a device its egress once, whatever the axes
        shared = links * np.where(joins, 1.0, 1.0 / self.device.per_chip)
        return size, np.where(links > 0, shared, CORE_LINKS) * self.link_bytes_per_s, hops * self.device.hop_s

    def gather_s(self, full_bytes: Number, degrees: Mapping[str, Number]) -> Number:
        """All-gather (or reduce-scatter) to ``full_bytes`` over several axes at once."""
        size, rate, latency = self.group(degrees)
        return np.where(size > 1, np.maximum(full_bytes * (size - 1) / size / rate, latency), 0.0)

    def exchange_s(self, full_bytes: Number, degrees: Mapping[str, Number]) -> Number:
        """All-to-all of ``full_bytes`` held by the whole group: a quarter of an all-gather of as much."""
        size, rate, latency = self.group(degrees)
        return np.where(size > 1, np.maximum(full_bytes / 4 / rate, latency), 0.0)

    def permute_s(self, sent_bytes: Number, degrees: Mapping[str, Number], *, one_link: bool) -> Number:
        """``sent_bytes`` of each device to its neighbour."""
        size, rate, _ = self.group(degrees)
        rate = self.link_bytes_per_s if one_link else rate
        return np.where(size > 1, sent_bytes / rate + self.device.hop_s, 0.0)

    def dcn_s(self, sent_bytes: Number) -> Number:
        """``sent_bytes`` leave one device for another slice."""
        return sent_bytes / self.device.dcn_bytes_per_s


def network_of(device: Device, placed: Mapping[str, AxisLinks]) -> Network:
    """The network of axes laid out as ``placed``."""
    return Network(
        device,
        {axis: a.links for axis, a in placed.items()},
        {axis: a.hops for axis, a in placed.items()},
        {axis: a.crosses_core for axis, a in placed.items()},
    )


@dataclass(frozen=True)
class Move:
    """A collective, ``forward`` times in the forward pass of whom it belongs to and ``backward`` times in the backward.

    ``axis`` is the line of an estimate that it counts to: one of ICI, or of DCN such as 'dcn data'. ``degrees``: of all
    mesh axes of that network which it joins. ``whole_bytes``: the gathered or unreduced array as one group sees it, the
    arrays of all devices of an all-to-all, and of a permute what one device sends.
    """

    op: Op
    axis: str
    degrees: Mapping[str, Number]
    whole_bytes: Number
    forward: Number = 0
    backward: Number = 0
    one_link: bool = False  # a permute that goes one way round, instead of both ways at once
    of_gradients: bool = False  # a gather that is part of summing gradients

    @property
    def network(self) -> Literal["ici", "dcn"]:
        return "dcn" if self.axis.startswith("dcn ") else "ici"

    @property
    def size(self) -> Number:
        """Members of a group."""
        size: Number = 1
        for degree in self.degrees.values():
            size = size * degree
        return size

    @property
    def sent_bytes(self) -> Number:
        """By each device: of an all-gather or a reduce-scatter (n-1)/n of the whole, of an all-reduce twice that."""
        n = self.size
        if self.op == "collective-permute":
            return np.where(n > 1, self.whole_bytes, 0.0)
        share = {"all-reduce": 2.0, "all-to-all": 1 / n}.get(self.op, 1.0)
        return share * self.whole_bytes * (n - 1) / n

    def seconds(self, net: Network) -> Number:
        """Of one of them."""
        if self.network == "dcn":
            return net.dcn_s(self.sent_bytes)
        if self.op == "all-to-all":
            return net.exchange_s(self.whole_bytes, self.degrees)
        if self.op == "collective-permute":
            return net.permute_s(self.whole_bytes, self.degrees, one_link=self.one_link)
        return (2 if self.op == "all-reduce" else 1) * net.gather_s(self.whole_bytes, self.degrees)
