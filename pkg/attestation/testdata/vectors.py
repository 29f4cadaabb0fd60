#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes vectors.json: the test vectors of the attestation protocol tpm/v1.

    python3 vectors.py > vectors.json

It was written from docs/spec.md and shares no code with the Go packages; section numbers below are those of that document. It
needs Python's standard library only, and every input is fixed: whoever runs it gets the same file. The private keys
in it are published here and protect nothing.
"""

import base64
import datetime
import hashlib
import hmac
import json
import re
import struct
import sys


def sha256(data):
    return hashlib.sha256(data).digest()


def made_up(what, size):
    """Bytes that look random and are the same each time."""
    return hashlib.shake_256(b"kubelet-authenticator test vector: " + what.encode()).digest(size)


def b64(data):
    return base64.b64encode(data).decode()


# --- ECDSA over P-256 with the deterministic nonce of RFC 6979, so that signatures are the same each time. Not constant time.

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)


def add(p, q):
    if p is None or q is None:
        return q or p
    if p[0] == q[0]:
        if p[1] != q[1]:
            return None
        slope = (3 * p[0] * p[0] - 3) * pow(2 * p[1], -1, P) % P
    else:
        slope = (q[1] - p[1]) * pow(q[0] - p[0], -1, P) % P
    x = (slope * slope - p[0] - q[0]) % P
    return x, (slope * (p[0] - x) - p[1]) % P


def multiply(k, p):
    result = None
    while k:
        if k & 1:
            result = add(result, p)
        p = add(p, p)
        k >>= 1
    return result


class Key:
    def __init__(self, what):
        self.d = int.from_bytes(made_up(what, 32), "big") % (N - 1) + 1
        self.x, self.y = (c.to_bytes(32, "big") for c in multiply(self.d, G))

    def sign(self, message):
        digest = sha256(message)
        z = int.from_bytes(digest, "big")
        seed = self.d.to_bytes(32, "big") + (z % N).to_bytes(32, "big")
        k, v = b"\0" * 32, b"\1" * 32
        for separator in (b"\0", b"\1"):  # RFC 6979, 3.2, steps d to g
            k = hmac.digest(k, v + separator + seed, "sha256")
            v = hmac.digest(k, v, "sha256")
        while True:
            v = hmac.digest(k, v, "sha256")
            nonce = int.from_bytes(v, "big")
            if 0 < nonce < N:
                r = multiply(nonce, G)[0] % N
                s = pow(nonce, -1, N) * (z + r * self.d) % N
                if r and s:
                    return r, s
            k = hmac.digest(k, v + b"\0", "sha256")
            v = hmac.digest(k, v, "sha256")

    def spki(self):
        algorithm = der(0x30, oid("1.2.840.10045.2.1") + oid("1.2.840.10045.3.1.7"))
        return der(0x30, algorithm + der(0x03, b"\0\4" + self.x + self.y))


# --- DER


def der(tag, content):
    n = len(content)
    if n < 128:
        length = bytes([n])
    else:
        raw = n.to_bytes((n.bit_length() + 7) // 8, "big")
        length = bytes([0x80 | len(raw)]) + raw
    return bytes([tag]) + length + content


def oid(dotted):
    numbers = [int(n) for n in dotted.split(".")]
    out = bytes([40 * numbers[0] + numbers[1]])
    for n in numbers[2:]:
        part = [n & 0x7F]
        while n := n >> 7:
            part.append(0x80 | n & 0x7F)
        out += bytes(reversed(part))
    return der(0x06, out)


def integer(n):
    return der(0x02, n.to_bytes(n.bit_length() // 8 + 1, "big"))


def pkcs10(key, node, provider_id):
    """Section 4."""

    def name(attribute, value):
        return der(0x31, der(0x30, oid(attribute) + der(0x13, value.encode())))

    subject = der(0x30, name("2.5.4.10", "system:nodes") + name("2.5.4.3", "system:node:" + node))
    attributes = b""
    if provider_id:
        value = der(0x04, der(0x0C, provider_id.encode()))
        extensions = der(0x30, der(0x30, oid("1.3.6.1.4.1.11129.2.1.21") + value))
        attributes = der(0x30, oid("1.2.840.113549.1.9.14") + der(0x31, extensions))
    info = der(0x30, integer(0) + subject + key.spki() + der(0xA0, attributes))
    r, s = key.sign(info)
    signature = der(0x03, b"\0" + der(0x30, integer(r) + integer(s)))
    return der(0x30, info + der(0x30, oid("1.2.840.10045.4.3.2")) + signature)


# --- Section 3: spec.request


def request(certification_request, provider, document):
    out = ""
    for label, content in (
        ("CERTIFICATE REQUEST", certification_request),
        ("KUBELET AUTHENTICATOR ATTESTATION PROVIDER", provider.encode()),
        ("KUBELET AUTHENTICATOR ATTESTATION DATA", document.encode()),
    ):
        text = b64(content)
        out += f"-----BEGIN {label}-----\n"
        for i in range(0, len(text), 64):
            out += text[i : i + 64] + "\n"
        out += f"-----END {label}-----\n"
    return out


# --- Sections 5 to 8: the documents


def hello(f):
    certificates = ""
    if f["ekCertificates"]:
        certificates = '"ekCertificates":[%s],' % ",".join('"%s"' % b64(c) for c in f["ekCertificates"])
    return (
        '{"version":"%s","kind":"hello","versions":[%s],"signerName":"%s","ekTemplate":"%s","ekPublic":"%s",%s"akPublic":"%s"}'
        % (
            f["version"],
            ",".join('"%s"' % v for v in f["versions"]),
            f["signerName"],
            f["ekTemplate"],
            b64(f["ekPublic"]),
            certificates,
            b64(f["akPublic"]),
        )
    )


def challenge(f):
    return (
        '{"version":"%s","kind":"challenge","kid":"%s","expires":%d,"credentialBlob":"%s","encryptedSecret":"%s",'
        '"pcrs":{"bank":"%s","indexes":[%s]},"eventLog":%s}'
        % (
            f["version"],
            f["kid"],
            f["expires"],
            b64(f["credentialBlob"]),
            b64(f["encryptedSecret"]),
            f["pcrs"]["bank"],
            ",".join(str(i) for i in f["pcrs"]["indexes"]),
            "true" if f["eventLog"] else "false",
        )
    )


def proof(f):
    return (
        '{"version":"%s","kind":"proof","helloName":"%s","helloUID":"%s","kid":"%s","expires":%d,"pcrBank":"%s","pcrs":[%s],'
        '"quote":"%s","signature":"%s"%s}'
        % (
            f["version"],
            f["helloName"],
            f["helloUID"],
            f["kid"],
            f["expires"],
            f["pcrBank"],
            ",".join('{"index":%d,"value":"%s"}' % (p["index"], b64(p["value"])) for p in f["pcrs"]),
            b64(f["quote"]),
            b64(f["signature"]),
            ',"eventLog":"%s"' % b64(f["eventLog"]) if f["eventLog"] else "",
        )
    )


# --- The reader. It follows the grammar of sections 5 to 8 and does not parse JSON, so that it cannot share a weakness with
# --- a reader that does.

LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
VERSION = LABEL + r"/v[1-9][0-9]{0,3}"
BYTES = (
    r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)"  # not empty
)
INTEGER = r"(?:0|[1-9][0-9]{0,18})"
KID = r"[a-z0-9._-]{1,64}"
GRAMMAR = {
    "hello": r'\{"version":"(?P<version>tpm/v1)","kind":"hello","versions":\[(?P<versions>"V"(?:,"V"){0,7})\],'
    r'"signerName":"[a-z0-9./:-]{1,571}","ekTemplate":"[a-z0-9-]{1,32}","ekPublic":"(?P<b1024_ek>B)",'
    r'(?:"ekCertificates":\[(?P<certificates>"B"(?:,"B"){0,5})\],)?"akPublic":"(?P<b1024_ak>B)"\}',
    "challenge": r'\{"version":"tpm/v1","kind":"challenge","kid":"K","expires":(?P<expires>I),'
    r'"credentialBlob":"(?P<b256_blob>B)","encryptedSecret":"(?P<b1024_secret>B)",'
    r'"pcrs":\{"bank":"sha(?:256|384|512)","indexes":\[(?P<indexes>I(?:,I){0,23})\]\},"eventLog":(?:true|false)\}',
    "proof": r'\{"version":"tpm/v1","kind":"proof","helloName":"[a-z0-9.-]{1,253}","helloUID":"[a-z0-9-]{1,64}",'
    r'"kid":"K","expires":(?P<expires>I),"pcrBank":"sha(?P<bank>256|384|512)",'
    r'"pcrs":\[(?P<pcrs>\{"index":I,"value":"B"\}(?:,\{"index":I,"value":"B"\}){0,23})\],'
    r'"quote":"(?P<b1024_quote>B)","signature":"(?P<b1024_signature>B)"(?:,"eventLog":"(?P<b57344_log>B)")?\}',
}


def grammar(kind):
    pattern = GRAMMAR[kind]
    for name, value in (("V", VERSION), ("B", BYTES), ("I", INTEGER), ("K", KID)):
        pattern = re.sub(r'(?<=["\[:,(>])%s(?=["\],()])' % name, lambda _: value, pattern)
    return re.compile(pattern.encode())


def decoded(text, limit):
    raw = base64.b64decode(text, validate=True)
    return raw if base64.b64encode(raw) == text and 0 < len(raw) <= limit else None


def ascending(indexes):
    return all(0 <= i <= 23 for i in indexes) and all(a < b for a, b in zip(indexes, indexes[1:]))


def is_versions(versions):
    """Section 9."""
    if not 1 <= len(versions) <= 8 or not all(re.fullmatch(VERSION, v, re.ASCII) for v in versions):
        return False
    providers, numbers = zip(*(v.split("/v") for v in versions))
    numbers = [int(n) for n in numbers]
    return len(set(providers)) == 1 and all(a > b for a, b in zip(numbers, numbers[1:]))


def accepts(kind, document):
    if len(document) > (4096 if kind == "challenge" else 90112):
        return False
    match = grammar(kind).fullmatch(document)
    if not match:
        return False
    for name, value in match.groupdict().items():
        if value is None:
            continue
        if name.startswith("b") and "_" in name:
            if decoded(value, int(name[1 : name.index("_")])) is None:
                return False
        elif name == "certificates":
            if any(decoded(c, 8192) is None for c in re.findall(rb'"([^"]*)"', value)):
                return False
        elif name == "expires":
            if not 0 < int(value) < 2**63:
                return False
        elif name == "indexes":
            if not ascending([int(i) for i in value.split(b",")]):
                return False
        elif name == "pcrs":
            size = int(match["bank"]) // 8
            values = re.findall(rb'\{"index":([0-9]+),"value":"([^"]*)"\}', value)
            if not ascending([int(i) for i, _ in values]):
                return False
            if any(len(decoded(v, 64) or b"") != size for _, v in values):
                return False
        elif name == "versions":
            versions = [v.decode() for v in re.findall(rb'"([^"]*)"', value)]
            if not is_versions(versions) or match["version"].decode() not in versions:
                return False
    return True


# --- Section 10: secret, transcript, MAC


def item(data):
    if isinstance(data, str):
        data = data.encode()
    return struct.pack(">I", len(data)) + data


def hkdf(key, salt, info, size):
    """RFC 5869 with SHA-256."""
    prk = hmac.digest(salt, key, "sha256")
    out, block, n = b"", b"", 1
    while len(out) < size:
        block = hmac.digest(prk, block + info + bytes([n]), "sha256")
        out, n = out + block, n + 1
    return out[:size]


def secret_info(f):
    return (
        item("kubelet-authenticator attestation secret")
        + item(f["version"])
        + item(f["clusterUID"])
        + item(f["signerName"])
        + item(sha256(f["ekPublicKey"]))
        + item(f["akName"])
        + item(sha256(f["helloRequest"].encode()))
        + item(struct.pack(">Q", f["expires"]))
        + item(f["pcrs"]["bank"])
        + item(bytes(f["pcrs"]["indexes"]))
    )


def transcript(f):
    expiration = "" if f["expirationSeconds"] is None else str(f["expirationSeconds"])
    return (
        item("kubelet-authenticator attestation transcript")
        + item(f["version"])
        + item(f["signerName"])
        + item(f["helloName"])
        + item(f["helloUID"])
        + item(sha256(f["helloRequest"].encode()))
        + item(f["proofName"])
        + item(sha256(f["pkcs10"]))
        + item(b"".join(item(u) for u in f["usages"]))
        + item(expiration)
        + item(f["kid"])
        + item(f["pcrs"]["bank"])
        + item(bytes(f["pcrs"]["indexes"]))
    )


def secret_vector(name, key, hello_uid, info):
    raw = secret_info(info)
    return {
        "name": name, "key": key, "helloUID": hello_uid, **info,
        "info": raw, "secret": hkdf(key, hello_uid.encode(), raw, 32),
    }  # fmt: skip


def transcript_vector(name, secret, f):
    raw = transcript(f)
    digest = sha256(raw)
    return {
        "name": name, "secret": secret, **f,
        "transcript": raw, "digest": digest, "mac": hmac.digest(secret, digest, "sha256"),
    }  # fmt: skip


# --- Sections 11 and 12: TPM structures

ALGORITHM = {"sha256": 0x000B, "sha384": 0x000C, "sha512": 0x000D}
LOW = bytes.fromhex("837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa")
HIGH_256 = bytes.fromhex("ca3d0a99a2b93906f7a3342414efcfb3a385d44cd1fd459089d19b5071c0b7a0")
HIGH_384 = bytes.fromhex(
    "b26e7d28d11a50bc53d882bcf5fd3a1a074148bb35d3b4e4cb1c0ad9bde419cacb47ba09699646150f9fc000f3f80e12"
)


def tpm2b(data):
    return struct.pack(">H", len(data)) + data


def ek_ecc(name_alg, attributes, policy, bits, curve, x, y):
    head = struct.pack(">HHI", 0x0023, name_alg, attributes) + tpm2b(policy)
    # AES in CFB mode; no scheme; the curve; no KDF.
    return head + struct.pack(">HHHHHH", 0x0006, bits, 0x0043, 0x0010, curve, 0x0010) + tpm2b(x) + tpm2b(y)


def ek_rsa(name_alg, attributes, policy, bits, modulus):
    head = struct.pack(">HHI", 0x0001, name_alg, attributes) + tpm2b(policy)
    # AES in CFB mode; no scheme; 2048 bits; exponent 0 stands for 65537.
    return head + struct.pack(">HHHHHI", 0x0006, bits, 0x0043, 0x0010, 2048, 0) + tpm2b(modulus)


def ak(x, y):
    head = struct.pack(">HHI", 0x0023, 0x000B, 0x00050472) + tpm2b(b"")
    # No symmetric algorithm; ECDSA with SHA-256; P-256; no KDF.
    return head + struct.pack(">HHHHH", 0x0010, 0x0018, 0x000B, 0x0003, 0x0010) + tpm2b(x) + tpm2b(y)


TEMPLATES = {
    "ecc-p256": ek_ecc(0x000B, 0x000300B2, LOW, 128, 0x0003, bytes(32), bytes(32)),
    "ecc-p256-high": ek_ecc(0x000B, 0x000300F2, HIGH_256, 128, 0x0003, b"", b""),
    "ecc-p384-high": ek_ecc(0x000C, 0x000300F2, HIGH_384, 256, 0x0004, b"", b""),
    "rsa-2048": ek_rsa(0x000B, 0x000300B2, LOW, 128, bytes(256)),
    "rsa-2048-high": ek_rsa(0x000B, 0x000300F2, HIGH_256, 128, b""),
    "ak": ak(b"kubelet-authenticator tpm/v1".ljust(32, b"\0"), bytes(32)),
}


def quote(ak_name, extra_data, pcrs, bank):
    """Section 12: a TPMS_ATTEST as a TPM makes it."""
    bits = 0
    for p in pcrs:
        bits |= 1 << p["index"]
    qualified = b"\x00\x0b" + sha256(struct.pack(">I", 0x4000000B) + ak_name)
    digest = sha256(b"".join(p["value"] for p in pcrs))
    attest = (
        struct.pack(">IH", 0xFF544347, 0x8018)
        + tpm2b(qualified)
        + tpm2b(extra_data)
        + struct.pack(">QIIB", 123456789, 7, 3, 1)  # clock, resetCount, restartCount, safe
        + struct.pack(">Q", 0x2020012800120030)  # firmwareVersion
        + struct.pack(">IHB", 1, ALGORITHM[bank], 3)
        + bits.to_bytes(3, "little")
        + tpm2b(digest)
    )
    return qualified, digest, attest


def signature(key, attest):
    r, s = key.sign(attest)
    return struct.pack(">HH", 0x0018, 0x000B) + tpm2b(r.to_bytes(32, "big")) + tpm2b(s.to_bytes(32, "big"))


# --- TPM2_MakeCredential for an EK on P-256 (Part 1, "Credential Protection")


def aes_128(key, block):
    """One block of AES (FIPS 197), slowly."""

    def times2(a):
        return (a << 1) ^ (0x11B if a & 0x80 else 0)

    sbox = [0x63] * 256
    p = q = 1
    while True:  # p runs through powers of 3, q through their inverses
        p ^= times2(p)
        for shift in (1, 2, 4):
            q ^= q << shift & 0xFF
        if q & 0x80:
            q ^= 0x09
        rotations = 0
        for shift in range(5):
            rotations ^= (q << shift | q >> (8 - shift)) & 0xFF
        sbox[p] = rotations ^ 0x63
        if p == 1:
            break
    words = [list(key[i : i + 4]) for i in range(0, 16, 4)]
    constant = 1
    for i in range(4, 44):
        word = words[i - 1]
        if i % 4 == 0:
            word = [sbox[b] for b in word[1:] + word[:1]]
            word[0] ^= constant
            constant = times2(constant)
        words.append([a ^ b for a, b in zip(words[i - 4], word)])
    state = [b ^ k for b, k in zip(block, sum(words[:4], []))]
    for n in range(1, 11):
        state = [sbox[b] for b in state]
        state = [state[(i + 4 * (i % 4)) % 16] for i in range(16)]
        if n < 10:
            mixed = []
            for c in range(0, 16, 4):
                column = state[c : c + 4]
                for i in range(4):
                    a, b = column[i], column[(i + 1) % 4]
                    mixed.append(times2(a) ^ times2(b) ^ b ^ column[(i + 2) % 4] ^ column[(i + 3) % 4])
            state = mixed
        state = [b ^ k for b, k in zip(state, sum(words[4 * n : 4 * n + 4], []))]
    return bytes(state)


def cfb(key, data):
    out, feedback = b"", bytes(16)
    for i in range(0, len(data), 16):
        part = data[i : i + 16]
        feedback = bytes(a ^ b for a, b in zip(part, aes_128(key, feedback)))
        out += feedback
    return out


def kdfa(key, label, context, bits):
    """Part 1, "KDFa", for one block."""
    counted = struct.pack(">I", 1) + label + b"\0" + context + struct.pack(">I", bits)
    return hmac.digest(key, counted, "sha256")[: bits // 8]


def make_credential(ek, ephemeral, name, credential):
    """ek is the EK's point, ephemeral a Key that is used once."""
    z = multiply(ephemeral.d, ek)[0].to_bytes(32, "big")
    seed = sha256(struct.pack(">I", 1) + z + b"IDENTITY\0" + ephemeral.x + ek[0].to_bytes(32, "big"))  # Part 1, "KDFe"
    identity = cfb(kdfa(seed, b"STORAGE", name, 128), tpm2b(credential))
    integrity = hmac.digest(kdfa(seed, b"INTEGRITY", b"", 256), identity + name, "sha256")
    return tpm2b(tpm2b(integrity) + identity), tpm2b(tpm2b(ephemeral.x) + tpm2b(ephemeral.y))


# --- The cases

SIGNER = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"


def exchange():
    """One whole exchange: what the controller and the node each know, and every byte that travels."""
    key = made_up("controller key", 32)
    node_key, ek_key, ak_key = Key("node key"), Key("EK"), Key("AK")
    der_request = pkcs10(node_key, "worker-1", "example:///zone-1/worker-1")
    ek_public = ek_ecc(0x000B, 0x000300B2, LOW, 128, 0x0003, ek_key.x, ek_key.y)
    ak_public = ak(ak_key.x, ak_key.y)
    ak_name = b"\x00\x0b" + sha256(ak_public)
    hello_fields = {
        "version": "tpm/v1",
        "versions": ["tpm/v1"],
        "signerName": SIGNER,
        "ekTemplate": "ecc-p256",
        "ekPublic": ek_public,
        "ekCertificates": [],
        "akPublic": ak_public,
    }
    hello_request = request(der_request, "tpm", hello(hello_fields))
    hello_uid = "0d3ff7b5-5e2a-4f2c-9f4c-3c1a8b1d7e60"
    pcrs = {"bank": "sha256", "indexes": [0, 2, 4, 7]}
    secret = secret_vector(
        "exchange", key, hello_uid,
        {
            "version": "tpm/v1",
            "clusterUID": "5a4e3a5e-7a5e-4c53-8f0b-0f5b8f6f2b11",
            "signerName": SIGNER,
            "ekPublicKey": ek_key.spki(),
            "akName": ak_name,
            "helloRequest": hello_request,
            "expires": 1767225600,
            "pcrs": pcrs,
        },
    )  # fmt: skip
    ek_point = tuple(int.from_bytes(c, "big") for c in (ek_key.x, ek_key.y))
    blob, encrypted = make_credential(ek_point, Key("ephemeral"), ak_name, secret["secret"])
    challenge_fields = {
        "version": "tpm/v1",
        "kid": "2026-01",
        "expires": 1767225600,
        "credentialBlob": blob,
        "encryptedSecret": encrypted,
        "pcrs": pcrs,
        "eventLog": False,
    }
    said = transcript_vector(
        "exchange", secret["secret"],
        {
            "version": "tpm/v1",
            "signerName": SIGNER,
            "helloName": "node-csr-aaaqeayeaudaocajbifqydiob4",
            "helloUID": hello_uid,
            "helloRequest": hello_request,
            "proofName": "node-csr-cajbifqydiobyhi7eaqsejbfey",
            "pkcs10": der_request,
            "usages": ["digital signature", "client auth"],
            "expirationSeconds": None,
            "kid": "2026-01",
            "pcrs": pcrs,
        },
    )  # fmt: skip
    values = [{"index": i, "value": made_up(f"PCR {i}", 32)} for i in pcrs["indexes"]]
    qualified, pcr_digest, attest = quote(ak_name, said["mac"], values, "sha256")
    proof_fields = {
        "version": "tpm/v1",
        "helloName": said["helloName"],
        "helloUID": hello_uid,
        "kid": "2026-01",
        "expires": 1767225600,
        "pcrBank": "sha256",
        "pcrs": values,
        "quote": attest,
        "signature": signature(ak_key, attest),
        "eventLog": b"",
    }
    return {
        "controllerKey": key,
        "clusterUID": secret["clusterUID"],
        "signerName": SIGNER,
        "usages": said["usages"],
        "pkcs10": der_request,
        "helloName": said["helloName"],
        "helloUID": hello_uid,
        "helloDocument": hello(hello_fields),
        "helloRequest": hello_request,
        "ekPublicKey": ek_key.spki(),
        "ekPrivateKey": ek_key.d.to_bytes(32, "big"),
        "akName": ak_name,
        "challenge": challenge(challenge_fields),
        "secret": secret["secret"],
        "proofName": said["proofName"],
        "mac": said["mac"],
        "qualifiedSigner": qualified,
        "pcrDigest": pcr_digest,
        "proofDocument": proof(proof_fields),
        "proofRequest": request(der_request, "tpm", proof(proof_fields)),
    }, secret, said, (hello_fields, challenge_fields, proof_fields)


def secrets(first):
    base = {k: first[k] for k in ("version", "clusterUID", "signerName", "ekPublicKey", "akName", "helloRequest", "expires", "pcrs")}
    short = "-----not a request, but bytes are bytes here-----\n"
    key, uid = first["key"], first["helloUID"]
    return [first] + [
        secret_vector(name, k, u, {**base, "helloRequest": short, **change})
        for name, k, u, change in (
            ("short request", key, uid, {}),
            ("key of 64 bytes", made_up("long key", 64), uid, {}),
            ("key of 100 bytes, longer than a block of SHA-256", made_up("longer key", 100), uid, {}),
            ("UID of 64 characters", key, "0" * 64, {}),
            ("empty cluster UID", key, uid, {"clusterUID": ""}),
            ("cluster UID that is not ASCII", key, uid, {"clusterUID": "gr\u00fcn"}),
            ("another signer", key, uid, {"signerName": "kubernetes.io/kube-apiserver-client-kubelet"}),
            ("AK name of SHA-384", key, uid, {"akName": b"\x00\x0c" + made_up("name", 48)}),
            ("earliest expiry", key, uid, {"expires": 1}),
            ("latest expiry", key, uid, {"expires": 2**63 - 1}),
            ("sha384, every PCR", key, uid, {"pcrs": {"bank": "sha384", "indexes": list(range(24))}}),
            ("sha512, the last PCR", key, uid, {"pcrs": {"bank": "sha512", "indexes": [23]}}),
            ("sha256, PCR 0", key, uid, {"pcrs": {"bank": "sha256", "indexes": [0]}}),
        )
    ]


def transcripts(first):
    base = {k: v for k, v in first.items() if k not in ("name", "secret", "transcript", "digest", "mac")}
    base.update(helloRequest="-----short-----\n", pkcs10=b"DER")
    return [first] + [
        transcript_vector(name, first["secret"], {**base, **change})
        for name, change in (
            ("short request", {}),
            ("expirationSeconds 600", {"expirationSeconds": 600}),
            ("expirationSeconds 0 is not unset", {"expirationSeconds": 0}),
            ("expirationSeconds greatest", {"expirationSeconds": 2**31 - 1}),
            ("one usage", {"usages": ["client auth"]}),
            ("no usage", {"usages": []}),
            ("usages in another order", {"usages": ["client auth", "digital signature"]}),
            ("usages of an RSA key", {"usages": ["digital signature", "key encipherment", "client auth"]}),
            ("two usages as one", {"usages": ["digital signatureclient auth"]}),
            ("names moved by a character", {"helloName": base["helloName"][:-1], "helloUID": base["helloName"][-1] + base["helloUID"]}),
            ("sha384, PCR 0 to 7", {"pcrs": {"bank": "sha384", "indexes": list(range(8))}}),
            ("sha512, PCR 23", {"pcrs": {"bank": "sha512", "indexes": [23]}}),
            ("kid of 64 characters", {"kid": "k" * 64}),
        )
    ]


def documents(hello_fields, challenge_fields, proof_fields):
    out = []

    def case(name, kind, fields):
        write = {"hello": hello, "challenge": challenge, "proof": proof}[kind]
        document = write(fields)
        assert accepts(kind, document.encode()), (kind, name)
        out.append({"name": name, "kind": kind, "fields": fields, "document": document})

    rsa = ek_rsa(0x000B, 0x000300B2, LOW, 128, b"\xc1" + made_up("modulus", 255))
    certificates = [der(0x30, made_up("EK certificate", 20)), der(0x30, made_up("issuer", 21)), der(0x30, made_up("root", 22))]
    case("without certificates", "hello", hello_fields)
    case("with three certificates", "hello", {**hello_fields, "ekCertificates": certificates})
    case("RSA, one certificate, several versions", "hello", {
        **hello_fields, "ekTemplate": "rsa-2048", "ekPublic": rsa, "ekCertificates": certificates[:1],
        "versions": ["tpm/v9999", "tpm/v10", "tpm/v9", "tpm/v1"],
    })  # fmt: skip
    case("the built-in signer", "hello", {**hello_fields, "signerName": "kubernetes.io/kube-apiserver-client-kubelet"})
    case("four PCRs", "challenge", challenge_fields)
    case("RSA, every PCR of sha384, event log", "challenge", {
        **challenge_fields, "kid": "k_2.a-b", "encryptedSecret": tpm2b(made_up("OAEP", 256)),
        "pcrs": {"bank": "sha384", "indexes": list(range(24))}, "eventLog": True,
    })  # fmt: skip
    case("latest expiry", "challenge", {**challenge_fields, "expires": 2**63 - 1})
    case("without event log", "proof", proof_fields)
    case("with event log", "proof", {**proof_fields, "eventLog": made_up("event log", 100)})
    case("one PCR of sha512", "proof", {**proof_fields, "pcrBank": "sha512", "pcrs": [{"index": 23, "value": made_up("PCR", 64)}]})
    case("every PCR of sha384", "proof", {
        **proof_fields, "pcrBank": "sha384", "pcrs": [{"index": i, "value": made_up(f"PCR {i}", 48)} for i in range(24)],
    })  # fmt: skip
    return out


def refused(hello_fields, challenge_fields, proof_fields):
    """Documents that are not to be accepted. field is the one at fault, empty where the form of the whole is; which one a reader
    names is its own affair, and where several are at fault it is the first by the order in which pkg/attestation looks."""
    # Short ones, to be read by people.
    hello_fields = {**hello_fields, "ekPublic": b"EK", "akPublic": b"AK"}
    challenge_fields = {**challenge_fields, "credentialBlob": b"blob", "encryptedSecret": b"secret"}
    proof_fields = {**proof_fields, "pcrs": proof_fields["pcrs"][:2], "quote": b"quote", "signature": b"signature"}
    out = []
    good = {"hello": hello(hello_fields), "challenge": challenge(challenge_fields), "proof": proof(proof_fields)}

    def bad(kind, name, field, document, then="", times=0):
        full = (document + then * times).encode("utf-8", "surrogateescape")
        assert not accepts(kind, full), (kind, name)
        assert full != good[kind].encode(), (kind, name)
        case = {"name": name, "kind": kind, "field": field}
        try:
            document.encode()
            case["document"] = document
        except UnicodeEncodeError:
            case["bytes"] = full  # not UTF-8
        if times:
            case["then"], case["times"] = then, times
        out.append(case)

    def swap(kind, name, field, old, new):
        assert good[kind].count(old) == 1, (kind, name, old)
        bad(kind, name, field, good[kind].replace(old, new))

    others = {"hello": "challenge", "challenge": "proof", "proof": "hello"}
    for kind, text in good.items():
        limit = 4096 if kind == "challenge" else 90112
        bad(kind, "nothing", "", "")
        bad(kind, "null", "kind", "null")
        bad(kind, "empty object", "kind", "{}")
        bad(kind, "array", "", "[" + text + "]")
        bad(kind, "string", "", json.dumps(text))
        bad(kind, "number", "", "1")
        bad(kind, "cut short", "", text[:-1])
        bad(kind, "line feed after", "", text + "\n")
        bad(kind, "space before", "", " " + text)
        bad(kind, "byte order mark", "", "\ufeff" + text)
        bad(kind, "zero byte after", "", text + "\0")
        bad(kind, "twice", "", text + text)
        bad(kind, "comma at the end", "", text[:-1] + ",}")
        bad(kind, "comment", "", text + "//")
        bad(kind, "single quotes", "", text.replace('"', "'"))
        bad(kind, "white space inside", "", text.replace(",", ", ", 1))
        bad(kind, "white space around a colon", "", text.replace(":", " :", 1))
        bad(kind, "indented", "", json.dumps(json.loads(text), indent=1))
        bad(kind, "unknown field last", "", text[:-1] + ',"extra":1}')
        bad(kind, "unknown field first", "", '{"extra":null,' + text[1:])
        bad(kind, "empty key", "", text[:-1] + ',"":0}')
        bad(kind, "fields sorted by name", "", json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")))
        # In a challenge pcrs is an object, in a proof an array: the form is what a reader stumbles over first.
        bad(kind, "of another kind", "" if kind == "challenge" else "kind", good[others[kind]])
        bad(kind, "oversize by white space", "", text, " ", limit)
        bad(kind, "nested without end", "", '{"version":', "[", limit - 20)
        swap(kind, "doubled version", "", '{"version":"tpm/v1"', '{"version":"tpm/v1","version":"tpm/v1"')
        swap(kind, "doubled version, the last wins", "", '{"version":"tpm/v1"', '{"version":"tpm/v2","version":"tpm/v1"')
        swap(kind, "key in another case", "", '{"version"', '{"Version"')
        swap(kind, "key in another case as well", "", '"kind"', '"KIND":"%s","kind"' % kind)
        swap(kind, "escaped letter in a key", "", '"kind"', '"k\\u0069nd"')
        swap(kind, "escaped letter in a value", "", '"kind":"%s"' % kind, '"kind":"\\u00%02x%s"' % (ord(kind[0]), kind[1:]))
        swap(kind, "escaped solidus", "", '{"version":"tpm/v1"', '{"version":"tpm\\/v1"')
        swap(kind, "kind in another case", "kind", '"kind":"%s"' % kind, '"kind":"%s"' % kind.title())
        swap(kind, "kind unknown", "kind", '"kind":"%s"' % kind, '"kind":"goodbye"')
        swap(kind, "kind missing", "kind", '"kind":"%s",' % kind, "")
        swap(kind, "kind null", "kind", '"kind":"%s"' % kind, '"kind":null')
        swap(kind, "kind a number", "", '"kind":"%s"' % kind, '"kind":1')
        swap(kind, "version missing", "version", '"version":"tpm/v1",', "")
        swap(kind, "version null", "version", '{"version":"tpm/v1"', '{"version":null')
        swap(kind, "version of another provider", "version", '{"version":"tpm/v1"', '{"version":"insecure/v1"')
        swap(kind, "version unknown", "version", '{"version":"tpm/v1"', '{"version":"tpm/v2"')
        swap(kind, "version with a leading zero", "version", '{"version":"tpm/v1"', '{"version":"tpm/v01"')
        swap(kind, "version nested", "", '{"version":"tpm/v1"', '{"version":{"version":"tpm/v1"}')
        swap(kind, "version in an array", "", '{"version":"tpm/v1"', '{"version":["tpm/v1"]')
        bad(kind, "kind before version", "", '{"kind":"%s","version":"tpm/v1",%s' % (kind, text.split(",", 2)[2]))

    # Base64, for one field of each document; and a value whose last quantum has bits to spare.
    for kind, field, fields, write in (
        ("hello", "akPublic", hello_fields, hello),
        ("challenge", "credentialBlob", challenge_fields, challenge),
        ("proof", "quote", proof_fields, proof),
    ):
        for name, at_fault, raw, text in (
            ("empty", field, b"", ""),
            ("one trailing bit set", "", b"\xfb\xff", "+/9="),
            ("four trailing bits set", "", b"\xfb", "+x=="),
            ("no padding", "", b"\xfb\xff", "+/8"),
            ("too much padding", "", b"\xfb\xff", "+/8=="),
            ("padding inside", "", b"\xfb\xff", "+/8=+/8="),
            ("only padding", "", b"\xfb\xff", "===="),
            ("URL alphabet", "", b"\xfb\xff", "-_8="),
            ("line feed escaped", "", b"\xfb\xff", "+/\\n8="),
            ("carriage return escaped", "", b"\xfb\xff", "+/8=\\r"),
            ("line feed raw", "", b"\xfb\xff", "+/\n8="),
            ("space", "", b"\xfb\xff", "+/8= "),
            ("escaped solidus", "", b"\xfb\xff", "+\\/8="),
            ("escaped letter", "", b"a", "\\u0059Q=="),
            ("not ASCII", "", b"\xfb\xff", "+/\u00e9="),
        ):
            document = write({**fields, field: raw})
            if raw:
                assert accepts(kind, document.encode())
            old = '"%s":"%s"' % (field, b64(raw))
            assert document.count(old) == 1
            bad(kind, f"{field}: {name}", at_fault, document.replace(old, '"%s":"%s"' % (field, text)))
        old = '"%s":"%s"' % (field, b64(fields[field]))
        bad(kind, f"{field}: missing", field, good[kind].replace(old + ",", "").replace("," + old, ""))
        swap(kind, f"{field}: null", field, old, '"%s":null' % field)
        swap(kind, f"{field}: array of numbers", "", old, '"%s":[1]' % field)
        swap(kind, f"{field}: number", "", old, '"%s":1' % field)
        swap(kind, f"{field}: doubled", "", old, old + "," + old)
        swap(kind, f"{field}: in another case as well", "", old, '"%s":"AA==",' % field.upper() + old)
        swap(kind, f"{field}: not UTF-8", "", old, '"%s":"\udcff"' % field)

    def vary(kind, name, field, **change):
        fields = {"hello": hello_fields, "challenge": challenge_fields, "proof": proof_fields}[kind]
        bad(kind, name, field, {"hello": hello, "challenge": challenge, "proof": proof}[kind]({**fields, **change}))

    # hello
    versions = '"versions":["tpm/v1"]'
    for name, field, new in (
        ("missing", "versions", None),
        ("null", "versions", "null"),
        ("empty", "versions", "[]"),
        ("one null", "versions", "[null]"),
        ("a string", "", '"tpm/v1"'),
        ("an object", "", '{"0":"tpm/v1"}'),
        ("numbers", "", "[1]"),
        ("nested", "", '[["tpm/v1"]]'),
        ("doubled", "versions", '["tpm/v1","tpm/v1"]'),
        ("the oldest first", "versions", '["tpm/v1","tpm/v2"]'),
        ("sorted as text", "versions", '["tpm/v9","tpm/v10","tpm/v1"]'),
        ("of two providers", "versions", '["tpm/v1","azure/v1"]'),
        ("of two providers, descending", "versions", '["azure/v2","tpm/v1"]'),
        ("of another provider", "version", '["azure/v1"]'),
        ("without version", "version", '["tpm/v2"]'),
        ("nine", "versions", json.dumps([f"tpm/v{n}" for n in range(9, 0, -1)], separators=(",", ":"))),
        ("zero", "versions", '["tpm/v1","tpm/v0"]'),
        ("10000", "versions", '["tpm/v10000","tpm/v1"]'),
        ("leading zero", "versions", '["tpm/v02","tpm/v1"]'),
        ("signed", "versions", '["tpm/v+2","tpm/v1"]'),
        ("negative", "versions", '["tpm/v1","tpm/v-1"]'),
        ("without number", "versions", '["tpm/v","tpm/v1"]'),
        ("without v", "versions", '["tpm/1"]'),
        ("V", "versions", '["tpm/V1"]'),
        ("minor", "versions", '["tpm/v1.0"]'),
        ("space", "versions", '["tpm/v1 "]'),
        ("no provider", "versions", '["/v1"]'),
        ("provider of 64", "versions", '["%s/v1"]' % ("a" * 64)),
        ("hyphen first", "versions", '["-tpm/v1"]'),
        ("hyphen last", "versions", '["tpm-/v1"]'),
        ("empty string", "versions", '[""]'),
    ):
        if new is None:
            swap("hello", "versions: " + name, field, versions + ",", "")
        else:
            swap("hello", "versions: " + name, field, versions, '"versions":' + new)
    for name, value in (("empty", ""), ("572 characters", "a" * 572), ("upper case", "Example.com/a"), ("space", "a/b c"), ("underscore", "a/b_c"), ("less-than sign", "a/<"), ("line feed", "a/b\\n"), ("not ASCII", "a/\u00e9")):
        vary("hello", "signerName: " + name, "signerName", signerName=value)
    swap("hello", "signerName: null", "signerName", '"signerName":"%s"' % SIGNER, '"signerName":null')
    swap("hello", "signerName: doubled", "", '"signerName":"%s"' % SIGNER, '"signerName":"%s","signerName":"%s"' % (SIGNER, SIGNER))
    for name, value in (("empty", ""), ("33 characters", "a" * 33), ("upper case", "ECC-P256"), ("dot", "ecc.p256")):
        vary("hello", "ekTemplate: " + name, "ekTemplate", ekTemplate=value)
    vary("hello", "ekPublic: empty", "ekPublic", ekPublic=b"")
    vary("hello", "ekPublic: 1025 bytes", "ekPublic", ekPublic=bytes(1025))
    vary("hello", "akPublic: 1025 bytes", "akPublic", akPublic=bytes(1025))
    vary("hello", "ekCertificates: eight", "ekCertificates", ekCertificates=[b"\x30\x00"] * 8)
    vary("hello", "ekCertificates: an empty one", "ekCertificates", ekCertificates=[b"\x30\x00", b""])
    for name, field, new in (
        ("empty array", "", "[]"),
        ("null", "", "null"),
        ("one null", "ekCertificates", "[null]"),
        ("a string", "", '"MAA="'),
        ("trailing bits", "", '["MAB="]'),
        ("8193 bytes", "ekCertificates", '["%s"]' % b64(bytes(8193))),
    ):
        swap("hello", "ekCertificates: " + name, field, '"akPublic"', '"ekCertificates":%s,"akPublic"' % new)
    bad("hello", "ekCertificates after akPublic", "", good["hello"][:-1] + ',"ekCertificates":["MAA="]}')

    # challenge and proof: kid and expires
    for kind in ("challenge", "proof"):
        for name, value in (("empty", ""), ("65 characters", "a" * 65), ("upper case", "A"), ("solidus", "a/b"), ("colon", "a:b"), ("space", "a b")):
            vary(kind, "kid: " + name, "kid", kid=value)
        for name, field, new in (
            ("zero", "expires", "0"),
            ("negative", "expires", "-1"),
            ("negative zero", "expires", "-0"),
            ("2^63", "", str(2**63)),
            ("huge", "", "9" * 400),
            ("exponent", "", "1e9"),
            ("exponent, lower still", "", "1E0"),
            ("fraction", "", "1767225600.0"),
            ("leading zero", "", "01767225600"),
            ("plus", "", "+1767225600"),
            ("hexadecimal", "", "0x1"),
            ("string", "", '"1767225600"'),
            ("null", "expires", "null"),
            ("boolean", "", "true"),
            ("array", "", "[1]"),
            ("NaN", "", "NaN"),
        ):
            swap(kind, "expires: " + name, field, '"expires":1767225600', '"expires":' + new)
        swap(kind, "expires: missing", "expires", '"expires":1767225600,', "")
        swap(kind, "expires: doubled", "", '"expires":1767225600', '"expires":1767225600,"expires":1767225600')

    # challenge
    vary("challenge", "credentialBlob: 257 bytes", "credentialBlob", credentialBlob=bytes(257))
    vary("challenge", "encryptedSecret: empty", "encryptedSecret", encryptedSecret=b"")
    vary("challenge", "encryptedSecret: 1025 bytes", "encryptedSecret", encryptedSecret=bytes(1025))
    for name, bank in (("sha1", "sha1"), ("upper case", "SHA256"), ("sm3_256", "sm3_256"), ("sha3-256", "sha3-256"), ("empty", ""), ("a number", "11")):
        vary("challenge", "pcrs: bank " + name, "pcrs", pcrs={"bank": bank, "indexes": [0]})
    for name, indexes in (
        ("none", []),
        ("doubled", [0, 0]),
        ("doubled, apart", [0, 7, 0]),
        ("descending", [7, 0]),
        ("24", [24]),
        ("256", [256]),
        ("negative", [-1]),
        ("25 of them", list(range(25))),
    ):
        vary("challenge", "pcrs: indexes " + name, "pcrs", pcrs={"bank": "sha256", "indexes": indexes})
    selection = '"pcrs":{"bank":"sha256","indexes":[0,2,4,7]}'
    for name, field, new in (
        ("null", "pcrs", "null"),
        ("empty", "pcrs", "{}"),
        ("array", "", "[0,2,4,7]"),
        ("indexes first", "", '{"indexes":[0,2,4,7],"bank":"sha256"}'),
        ("bank doubled", "", '{"bank":"sha1","bank":"sha256","indexes":[0,2,4,7]}'),
        ("list doubled", "", '{"bank":"sha256","indexes":[0],"indexes":[0,2,4,7]}'),
        ("unknown field", "", '{"bank":"sha256","indexes":[0,2,4,7],"x":0}'),
        ("bank in another case", "", '{"Bank":"sha256","indexes":[0,2,4,7]}'),
        ("no bank", "pcrs", '{"indexes":[0]}'),
        ("no indexes", "pcrs", '{"bank":"sha256"}'),
        ("indexes null", "pcrs", '{"bank":"sha256","indexes":null}'),
        ("index null", "", '{"bank":"sha256","indexes":[null]}'),
        ("index a string", "", '{"bank":"sha256","indexes":["0"]}'),
        ("index a fraction", "", '{"bank":"sha256","indexes":[0.0]}'),
        ("index with exponent", "", '{"bank":"sha256","indexes":[1e0]}'),
        ("index with leading zero", "", '{"bank":"sha256","indexes":[00]}'),
        ("index minus zero", "", '{"bank":"sha256","indexes":[-0]}'),
        ("index huge", "", '{"bank":"sha256","indexes":[18446744073709551616]}'),
        ("indexes base64", "", '{"bank":"sha256","indexes":"AAIEBw=="}'),
    ):
        swap("challenge", "pcrs: " + name, field, selection, '"pcrs":' + new)
    for name, new in (("null", ':null'), ("string", ':"false"'), ("number", ":0"), ("True", ":True")):
        swap("challenge", "eventLog: " + name, "", '"eventLog":false', '"eventLog"' + new)
    swap("challenge", "eventLog: missing", "", ',"eventLog":false', "")
    swap("challenge", "eventLog: doubled", "", '"eventLog":false', '"eventLog":true,"eventLog":false')

    # proof
    for name, value in (("empty", ""), ("254 characters", "a" * 254), ("upper case", "Node"), ("solidus", "a/b"), ("underscore", "a_b")):
        vary("proof", "helloName: " + name, "helloName", helloName=value)
    for name, value in (("empty", ""), ("65 characters", "a" * 65), ("upper case", "0D3F"), ("braces", "{0}"), ("dot", "a.b")):
        vary("proof", "helloUID: " + name, "helloUID", helloUID=value)
    for name, bank in (("sha1", "sha1"), ("upper case", "SHA256"), ("empty", "")):
        vary("proof", "pcrBank: " + name, "pcrs", pcrBank=bank)
    vary("proof", "pcrBank: not that of the values", "pcrs", pcrBank="sha384")
    digest = made_up("PCR", 32)
    for name, pcrs in (
        ("none", []),
        ("doubled", [(0, digest), (0, digest)]),
        ("descending", [(7, digest), (0, digest)]),
        ("24", [(24, digest)]),
        ("negative", [(-1, digest)]),
        ("25 of them", [(i, digest) for i in range(25)]),
        ("value of 31 bytes", [(0, digest[:31])]),
        ("value of 33 bytes", [(0, digest + b"\0")]),
        ("value of 48 bytes", [(0, made_up("PCR", 48))]),
        ("value empty", [(0, b"")]),
        ("the second value empty", [(0, digest), (1, b"")]),
    ):
        vary("proof", "pcrs: " + name, "pcrs", pcrs=[{"index": i, "value": v} for i, v in pcrs])
    one = proof({**proof_fields, "pcrs": [{"index": 0, "value": digest}]})
    member = '{"index":0,"value":"%s"}' % b64(digest)
    for name, field, new in (
        ("value first", "", '[{"value":"%s","index":0}]' % b64(digest)),
        ("no index", "", '[{"value":"%s"}]' % b64(digest)),
        ("no value", "pcrs", '[{"index":0}]'),
        ("value null", "pcrs", '[{"index":0,"value":null}]'),
        ("index a string", "", '[{"index":"0","value":"%s"}]' % b64(digest)),
        ("index a fraction", "", '[{"index":0.0,"value":"%s"}]' % b64(digest)),
        ("index minus zero", "", '[{"index":-0,"value":"%s"}]' % b64(digest)),
        ("index null", "", '[{"index":null,"value":"%s"}]' % b64(digest)),
        ("unknown field", "", '[{"index":0,"value":"%s","x":0}]' % b64(digest)),
        ("index doubled", "", '[{"index":1,"index":0,"value":"%s"}]' % b64(digest)),
        ("value hexadecimal", "pcrs", '[{"index":0,"value":"%s"}]' % digest.hex()),
        ("null", "pcrs", "null"),
        ("one null", "pcrs", "[null]"),
        ("an object", "", member),
        ("a map", "", '{"0":"%s"}' % b64(digest)),
        ("comma at the end", "", "[%s,]" % member),
    ):
        assert one.count("[" + member + "]") == 1
        bad("proof", "pcrs: " + name, field, one.replace("[" + member + "]", new))
    vary("proof", "quote: 1025 bytes", "quote", quote=bytes(1025))
    vary("proof", "signature: empty", "signature", signature=b"")
    vary("proof", "signature: 1025 bytes", "signature", signature=bytes(1025))
    for name, new in (("empty", '""'), ("null", "null"), ("false", "false"), ("trailing bits", '"+x=="'), ("array", "[]")):
        bad("proof", "eventLog: " + name, "", good["proof"][:-1] + ',"eventLog":%s}' % new)
    bad("proof", "eventLog before signature", "", good["proof"].replace(',"signature"', ',"eventLog":"AA==","signature"'))
    bad("proof", "eventLog: doubled", "", good["proof"][:-1] + ',"eventLog":"AA==","eventLog":"AA=="}')
    names = [(c["kind"], c["name"]) for c in out]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]
    return out


def bad_requests(whole):
    """Section 3: what is not one spec.request."""
    good = whole["helloRequest"]
    blocks = re.findall(r"-----BEGIN [^-]+-----\n[^-]+-----END [^-]+-----\n", good)
    assert "".join(blocks) == good and len(blocks) == 3
    a, b, c = blocks
    cases = {
        "nothing": "",
        "one block": a,
        "two blocks": a + b,
        "four blocks": good + c,
        "another order": a + c + b,
        "provider first": b + a + c,
        "doubled request": a + good,
        "line feed after": good + "\n",
        "line feed before": "\n" + good,
        "line feed between": a + "\n" + b + c,
        "text between": a + "hello\n" + b + c,
        "no last line feed": good[:-1],
        "carriage returns": good.replace("\n", "\r\n"),
        "spaces at the end of lines": good.replace("\n", " \n"),
        "a header": a + b.replace("PROVIDER-----\n", "PROVIDER-----\nProc-Type: 4,ENCRYPTED\n\n", 1) + c,
        "lines of 76": re.sub(r"(?s)(PROVIDER-----\n.*DATA-----\n)(.*?)(-----END)", lambda m: m[1] + re.sub("(.{76})", r"\1\n", m[2].replace("\n", "")) + "\n" + m[3], good),
        "old label": good.replace("BEGIN CERTIFICATE", "BEGIN NEW CERTIFICATE").replace("END CERTIFICATE", "END NEW CERTIFICATE"),
        "label in lower case": a + b.lower() + c,
        "ends of another block": a + b.replace("END KUBELET AUTHENTICATOR ATTESTATION PROVIDER", "END KUBELET AUTHENTICATOR ATTESTATION DATA") + c,
        "no padding": good.replace("\n" + b64(b"tpm") + "\n", "\n" + b64(b"tpm2").rstrip("=") + "\n"),
        "trailing bits": good.replace("\n" + b64(b"tpm") + "\n", "\ndHBtMh==\n"),
        "empty provider": a + request(b"", "", "").split("-----END CERTIFICATE REQUEST-----\n")[1].split("-----BEGIN KUBELET AUTHENTICATOR ATTESTATION DATA")[0] + c,
        "provider with line feed": request(whole["pkcs10"], "tpm\n", whole["helloDocument"]),
        "provider in upper case": request(whole["pkcs10"], "TPM", whole["helloDocument"]),
        "provider with a hyphen last": request(whole["pkcs10"], "tpm-", whole["helloDocument"]),
        "provider of 64 characters": request(whole["pkcs10"], "a" * 64, whole["helloDocument"]),
        "empty request": request(b"", "tpm", whole["helloDocument"]),
        "empty document": request(whole["pkcs10"], "tpm", ""),
    }  # fmt: skip
    assert good not in cases.values() and len(set(cases.values())) == len(cases)
    return [{"name": name, "request": text} for name, text in cases.items()]


def version_lists():
    nines = [f"{'a' * 63}/v{n}" for n in range(9999, 9991, -1)]
    good = ["tpm/v1", "tpm/v2,tpm/v1", "tpm/v10,tpm/v9", "azure-vtpm/v9999", "a/v3,a/v1", "0/v1", ",".join(f"tpm/v{n}" for n in range(8, 0, -1)), ",".join(nines)]
    bad = [
        "", ",", "tpm", "tpm/", "tpm/v", "tpm/v0", "tpm/v01", "tpm/v10000", "tpm/v+1", "tpm/v-1", "tpm/v1.0", "tpm/v 1", "tpm/v1 ", " tpm/v1",
        "tpm/V1", "TPM/v1", "/v1", "v1", "tpm/v1,", ",tpm/v1", "tpm/v2,,tpm/v1", "tpm/v2, tpm/v1", "tpm/v2;tpm/v1", "tpm/v1,tpm/v2", "tpm/v1,tpm/v1",
        "tpm/v2,azure/v1", "azure/v2,tpm/v1", "-tpm/v1", "tpm-/v1", "t_m/v1", "t.m/v1", "tpm/v1/v1", "a" * 64 + "/v1", "tpm/v1\n", "tpm/v\u0661",
        '["tpm/v1"]', ",".join(f"tpm/v{n}" for n in range(9, 0, -1)), ",".join(f"{'a' * 63}/v{n}" for n in range(9999, 9990, -1)),
    ]  # fmt: skip
    assert all(is_versions(g.split(",")) for g in good)
    assert not any(is_versions(b.split(",")) for b in bad), [b for b in bad if is_versions(b.split(","))]
    common = [
        {"ours": ours, "theirs": theirs, "tried": tried, "want": want}
        for ours, theirs, tried, want in (
            ("tpm/v1", "tpm/v1", [], "tpm/v1"),
            ("tpm/v1", "tpm/v1", ["tpm/v1"], ""),
            ("tpm/v3,tpm/v2,tpm/v1", "tpm/v4,tpm/v2,tpm/v1", [], "tpm/v2"),
            ("tpm/v3,tpm/v2,tpm/v1", "tpm/v4,tpm/v2,tpm/v1", ["tpm/v3"], "tpm/v2"),
            ("tpm/v3,tpm/v2,tpm/v1", "tpm/v4,tpm/v2,tpm/v1", ["tpm/v3", "tpm/v2"], "tpm/v1"),
            ("tpm/v3,tpm/v2", "tpm/v1", [], ""),
            ("tpm/v10,tpm/v9", "tpm/v10,tpm/v9", [], "tpm/v10"),
            ("tpm/v1", "azure/v1", [], ""),
            ("tpm/v1", "tpm/v11", [], ""),
        )
    ]
    return {"accepted": good, "refused": bad, "common": common}


def heads(whole):
    h, c, p = whole["helloDocument"], whole["challenge"], whole["proofDocument"]
    longest = "%s/v9999" % ("a" * 63)
    rows = [
        (h, "tpm/v1", "hello"), (c, "tpm/v1", "challenge"), (p, "tpm/v1", "proof"),
        ('{"version":"insecure/v1"}', "insecure/v1", ""),
        ('{"version":"tpm/v2","kind":"greeting","more":[{"of":"it"}]}', "tpm/v2", "greeting"),
        ('{"version":"%s","kind":"%s"}' % (longest, "k" * 32), longest, "k" * 32),
        ('{"version":"tpm/v1","kind":"%s"}' % ("k" * 33), "tpm/v1", ""),
        ('{"version":"tpm/v1","kind":"Hello"}', "tpm/v1", ""),
        ('{"version":"tpm/v1","kind":""}', "tpm/v1", ""),
        ('{"version":"tpm/v1","kind":1}', "tpm/v1", ""),
        ('{"version":"tpm/v1","kind":"hello', "tpm/v1", ""),
        ('{"version":"tpm/v1", "kind":"hello"}', "tpm/v1", ""),
        ('{"version":"tpm/v1","versions":["tpm/v1"],"kind":"hello"}', "tpm/v1", ""),
        ("", "", ""), ("{}", "", ""), ("null", "", ""), ('{"kind":"hello","version":"tpm/v1"}', "", ""),
        (' {"version":"tpm/v1"}', "", ""), ('{"Version":"tpm/v1"}', "", ""), ('{"version": "tpm/v1"}', "", ""),
        ('{"version":"tpm/v0","kind":"hello"}', "", ""), ('{"version":"tpm/v01","kind":"hello"}', "", ""), ('{"version":"","kind":"hello"}', "", ""),
        ('{"version":1}', "", ""), ('{"version":"%s/v1"}' % ("a" * 64), "", ""), ('{"version":"tpm\\/v1"}', "", ""),
    ]  # fmt: skip
    return [{"document": d, "version": v, "kind": k} for d, v, k in rows]


# --- Section 17


def moment(renewal, node):
    """In whole seconds since 1970."""
    f = int.from_bytes(sha256(renewal["name"].encode() + b"\0" + node.encode())[:8], "big")
    return max(renewal["issuedBefore"], renewal["start"] + f * renewal.get("spreadSeconds", 0) // (2**64 - 1))


def rfc3339(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def announcement(renewals):
    times = [{k: rfc3339(v) if k in ("issuedBefore", "start") else v for k, v in r.items()} for r in renewals]
    return json.dumps({"version": 1, "renewals": times})


def announcements():
    day = 1767225600
    rotation = {"name": "rotation", "issuedBefore": day, "all": True, "start": day + 60, "spreadSeconds": 3600}
    one = {"name": "one", "issuedBefore": day + 100, "nodes": ["worker-1"], "start": day}
    early = {"name": "early", "issuedBefore": day + 7200, "all": True, "start": day, "spreadSeconds": 60}
    cases = []
    for name, renewals, node, not_before, done in (
        ("all", [rotation], "worker-1", day - 1, []),
        ("another node at another time", [rotation], "worker-2", day - 1, []),
        ("a certificate that is not selected", [rotation], "worker-1", day, []),
        ("a node of a list", [one], "worker-1", day, []),
        ("not before issuedBefore", [early], "worker-1", day, []),
        ("a node that is not listed", [one], "worker-2", day, []),
        ("the earliest, each not before its issuedBefore", [early, rotation, one], "worker-1", day - 1, []),
        ("two, and one is earlier although it starts later", [early, rotation], "worker-1", day - 1, []),
        ("done", [rotation, early], "worker-1", day - 1, ["rotation"]),
        ("all done", [rotation], "worker-1", day - 1, ["rotation"]),
        ("nothing is announced", [], "worker-1", day, []),
    ):
        selected = [
            r for r in renewals
            if not_before < r["issuedBefore"] and (r.get("all") or node in r.get("nodes", [])) and r["name"] not in done
        ]  # fmt: skip
        at, renewal = min(((moment(r, node), r["name"]) for r in selected), default=(0, ""))
        cases.append({
            "name": name, "entry": announcement(renewals), "node": node, "notBefore": not_before, "done": done, "renewal": renewal, "at": at,
        })  # fmt: skip
    entries = {
        "version 2": announcement([rotation]).replace('"version": 1', '"version": 2'),
        "no version": "{}",
        "not JSON": "rotation",
        "a list": "[]",
        "no name": announcement([{**rotation, "name": ""}]),
        "a name of 254 bytes": announcement([{**rotation, "name": "x" * 254}]),
        "a spread below 0": announcement([{**rotation, "spreadSeconds": -1}]),
        "no issuedBefore": announcement([rotation]).replace("issuedBefore", "issued"),
        "no start": announcement([rotation]).replace('"start"', '"begin"'),
        "a time without a zone": announcement([rotation]).replace("Z", ""),
        "a spread in quotes": announcement([rotation]).replace("3600", '"3600"'),
    }
    return {"cases": cases, "refused": [{"name": n, "entry": e} for n, e in entries.items()]}


# --- Section 18


def origin(f):
    return '{"version":"tpm/v1","kind":"origin","akPublic":"%s","quote":"%s","signature":"%s"}' % (
        b64(f["akPublic"]), b64(f["quote"]), b64(f["signature"]),
    )  # fmt: skip


def origins(proof_fields):
    key, other = Key("AK"), Key("another AK")
    name, content = "node-csr-aaaqeayeaudaocajbifqydiob4", b"the bytes of spec.request"

    def extra(name=name, label=b"kubelet-authenticator attestation origin", version=b"tpm/v1"):
        return sha256(b"".join(item(x) for x in (label, version, name.encode(), sha256(content))))

    def attest(data, selected=b"", kind=0x8018, magic=0xFF544347, signer=key, after=b""):
        banks = struct.pack(">I", 1) + selected if selected else struct.pack(">I", 0)
        return (
            struct.pack(">IH", magic, kind) + tpm2b(b"\x00\x0b" + sha256(struct.pack(">I", 0x4000000B) + b"\x00\x0b" + sha256(ak(signer.x, signer.y))))
            + tpm2b(data) + struct.pack(">QIIBQ", 123456789, 7, 3, 1, 0x2020012800120030) + banks + tpm2b(sha256(b"")) + after
        )  # fmt: skip

    def signed(quoted, by=key, **changes):
        return {"akPublic": ak(key.x, key.y), "quote": quoted, "signature": signature(by, quoted), **changes}

    good = signed(attest(extra()))
    one_pcr = struct.pack(">HB", 0x000B, 3) + b"\1\0\0"
    public = ak(key.x, key.y)
    accepted = {
        "good": good,
        "a PCR is selected: not compared": signed(attest(extra(), one_pcr)),
        "another qualifiedSigner: not compared": signed(attest(extra(), signer=other)),
    }
    refused = {
        "another name": signed(attest(extra("node-csr-b"))),
        "another label": signed(attest(extra(label=b"kubelet-authenticator attestation proof"))),
        "another version in extraData": signed(attest(extra(version=b"tpm/v2"))),
        "no extraData": signed(attest(b"")),
        "signed by another key": signed(attest(extra()), by=other),
        "the AK of another TPM": signed(attest(extra()), akPublic=ak(other.x, other.y)),
        "an AK that may decrypt": signed(attest(extra()), akPublic=public[:5] + bytes([public[5] | 0x02]) + public[6:]),
        "an AK off the curve": signed(attest(extra()), akPublic=ak(key.y, key.x)),
        "not a quote": signed(attest(extra(), kind=0x8017)),
        "another magic": signed(attest(extra(), magic=0xFF544348)),
        "bytes after the quote": signed(attest(extra(), after=b"\0")),
        "bytes after the signature": {**good, "signature": good["signature"] + b"\0"},
        "the quote of a proof": signed(proof_fields["quote"]),
    }
    assert all(r != good for r in refused.values())
    rows = [{"name": n, "origin": origin(f), "akName": b"\x00\x0b" + sha256(f["akPublic"])} for n, f in accepted.items()]
    rows += [{"name": n, "origin": origin(f), "akName": b""} for n, f in refused.items()]
    text = origin(good)
    for n, changed in (
        ("a blank", text.replace(",", ", ", 1)), ("another version", text.replace("tpm/v1", "tpm/v2")), ("another kind", text.replace('"origin"', '"proof"')),
        ("a field more", text[:-1] + ',"more":1}'), ("no signature", text[: text.index(',"signature"')] + "}"), ("empty", ""),
        ("an empty quote", origin({**good, "quote": b""})), ("an AK of 1025 bytes", origin({**good, "akPublic": bytes(1025)})),
    ):  # fmt: skip
        rows.append({"name": n, "origin": changed, "akName": b""})
    return {"objectName": name, "request": content, "extraData": extra(), "cases": rows}


# --- Section 1: the annotation waiting


def waitings():
    good = ["MachineNotFound: run this", "A: b", "A: b: c", "A1b2: !~", "A" * 64 + ": b", "A: " + "b" * 509]
    bad = [
        "", "A", "A:", "A: ", "A:b", ": b", "a: b", "1A: b", "A B: c", "A-B: c", "A:  b", "A: b ", " A: b", "A: b\n", "A: b\tc", "A: b\u001b[2J", "A: b\u202ec",
        "A: \u00e4", "A: b\u007f", "A\n: b", "A" * 65 + ": b", "A: " + "b" * 510,
    ]  # fmt: skip

    def reads(text):
        return len(text) <= 512 and re.fullmatch(r"[A-Z][A-Za-z0-9]{0,63}: [!-~]([ -~]*[!-~])?", text, re.ASCII)

    assert all(map(reads, good)) and not any(map(reads, bad))
    return {"accepted": [{"value": g, "reason": g[: g.index(":")], "text": g[g.index(":") + 2 :]} for g in good], "refused": bad}


def printable(value):
    """bytes become hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {k: printable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(v) for v in value]
    return value


def main():
    # FIPS 197, appendix C.1.
    assert aes_128(bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"
    whole, secret, said, fields = exchange()
    vectors = {
        "comment": "Written by vectors.py from docs/spec.md. Byte strings are hexadecimal, except inside documents and requests.",
        "templates": TEMPLATES,
        "exchange": whole,
        "secrets": secrets(secret),
        "transcripts": transcripts(said),
        "documents": documents(*fields),
        "refusedDocuments": refused(*fields),
        "refusedRequests": bad_requests(whole),
        "versions": version_lists(),
        "heads": heads(whole),
        "announcements": announcements(),
        "origins": origins(fields[2]),
        "waiting": waitings(),
    }
    json.dump(printable(vectors), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
