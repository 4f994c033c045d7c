"""Teachers: beside the student, on disk, and behind a socket."""

import itertools
import json
import os
import socket
import stat
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from pixelrag.config.distill_parts import StudentConfig, TeacherConfig
from pixelrag.distributed.env import World
from pixelrag.errors import EngineError, ProvenanceError
from pixelrag.losses.kd import Logits, Projected, TopK
from pixelrag.models import answer_cache, handshake, teacher_memory, wire
from pixelrag.models.answer_cache import MANIFEST, CachedTeacher, Manifest, document_keys
from pixelrag.models.answer_writer import AnswerWriter, join_ranks
from pixelrag.models.causal import head_logits
from pixelrag.models.causal_load import load_frozen, load_student
from pixelrag.models.handshake import TOKEN_VARIABLE
from pixelrag.models.rows import Rows
from pixelrag.models.state_codec import decode, encode
from pixelrag.models.teacher import LiveTeacher, TeacherRequest, load_teacher
from pixelrag.models.teacher_channel import Greeting, RemoteTeacher, TeacherServer
from pixelrag.models.tiny_causal import save_tiny_causal

CPU = torch.device("cpu")
WORLD = World(0, 1, 0, CPU)
VOCAB = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_causal(tmp_path_factory.mktemp("teacher") / "m", "llama", hidden_size=72)


def live(folder: Path, dtype: torch.dtype = torch.float32, **options) -> LiveTeacher:
    model = load_frozen(TeacherConfig(name_or_path=str(folder)), dtype=dtype)
    return LiveTeacher(model, device=CPU, student_device=CPU, **options)


def request(seed: int = 0, lengths=((9, 14, 7), (20, 4, 6))) -> TeacherRequest:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.randint(0, VOCAB, positions.shape, generator=generator)
    next_position = torch.zeros_like(positions)
    next_position[:, :-1] = positions[:, 1:]
    chosen = torch.rand(positions.shape, generator=generator) < 0.5
    supervised = ((next_position > 0) & chosen).flatten().nonzero().flatten()
    return TeacherRequest(Rows.of(ids, positions), supervised)


def logits_of(answer: Projected) -> torch.Tensor:
    return head_logits(answer.hidden_TH, answer.head)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


class TestLive:
    def test_it_answers_at_the_supervised_tokens(self, folder):
        teacher, asked = live(folder, torch.float64), request()
        answer = teacher.answer(asked)
        whole = teacher.model.logits(asked.rows).flatten(0, 1)[asked.supervised_N]
        assert error(logits_of(answer), whole) < 1e-13
        given = live(folder, torch.float64, whole_logits=True).answer(asked)
        assert isinstance(given, Logits)
        assert torch.equal(given.logits_TV, whole)

    def test_it_never_learns(self, folder):
        teacher = live(folder)
        assert not teacher.model.training
        assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
        answer = teacher.answer(request())
        assert not answer.hidden_TH.requires_grad
        assert not answer.head.weight_VH.requires_grad

    def test_one_made_of_a_training_model_is_frozen(self, folder):
        student = load_student(StudentConfig(name_or_path=str(folder)))
        teacher = LiveTeacher(student, device=CPU, student_device=CPU)
        assert not teacher.model.training
        assert not any(parameter.requires_grad for parameter in teacher.model.parameters())

    def test_its_precision_is_its_own(self, folder):
        for precision, wanted, dtype in (
            ("auto", "bf16", torch.bfloat16),
            ("auto", "fp32", torch.float32),
            ("bf16", "fp32", torch.bfloat16),
            ("fp32", "bf16", torch.float32),
        ):
            config = TeacherConfig(name_or_path=str(folder), precision=precision)
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group(
                    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
                )
            try:
                teacher = load_teacher(config, WORLD, precision=wanted)
            finally:
                torch.distributed.destroy_process_group()
            assert teacher.model.dtype == dtype
            assert teacher.answer(request()).hidden_TH.dtype == dtype

    def test_the_self_test_runs_and_refuses_a_leak(self, folder, monkeypatch):
        from pixelrag.errors import ModelError
        from pixelrag.models.causal import CausalLM

        teacher = live(folder)
        teacher.self_test(VOCAB, isolated=True)
        inputs = CausalLM._inputs

        def leaky(self, rows):
            return inputs(self, rows) | {"cu_seq_lens_q": torch.tensor([0, rows.bounds[-1]])}

        monkeypatch.setattr(CausalLM, "_inputs", leaky)
        with pytest.raises(ModelError, match="see each other"):
            teacher.self_test(VOCAB, isolated=True)
        teacher.self_test(VOCAB, isolated=False)

    def test_offloaded_blocks_come_for_their_forward_and_go(self, folder, monkeypatch):
        plain, moved = live(folder), live(folder)
        blocks = moved.model.blocks()
        homes = [[p.data_ptr() for p in block.parameters()] for block in blocks]
        visits: list[int] = []
        # On one device `to` gives the tensor itself; a copy stands for the GPU's.
        monkeypatch.setattr(
            teacher_memory, "_fetch", lambda tensor, device: visits.append(1) or tensor.clone()
        )
        teacher_memory.offload_blocks(moved.model, blocks, CPU)
        during: list[bool] = []
        blocks[0].mlp.register_forward_hook(
            lambda module, *_: during.append(module.up_proj.weight.data_ptr() in homes[0])
        )
        answer = moved.answer(request())
        assert torch.equal(answer.hidden_TH, plain.answer(request()).hidden_TH)
        assert during == [False]
        assert len(visits) == sum(len(home) for home in homes)
        assert [[p.data_ptr() for p in block.parameters()] for block in blocks] == homes


class TestCodec:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_exact_keeps_every_bit(self, dtype):
        states = torch.randn(5, 100).to(dtype)
        assert torch.equal(decode(encode(states, "exact"), dtype), states)

    @pytest.mark.parametrize("width", [64, 100, 7])
    def test_int8_keeps_two_digits_of_each_group(self, width):
        states = torch.randn(50, width) * torch.logspace(-3, 3, 50)[:, None]
        states[3] = 0
        parts = encode(states, "int8")
        assert parts["values"].shape == states.shape
        again = decode(parts, torch.float32)
        assert torch.equal(again[3], states[3])
        for row in (0, 20, 49):
            # Half a step of 1/127 of the group's largest value.
            assert (again[row] - states[row]).abs().max() <= states[row].abs().max() / 253
        assert error(again, states) < 0.01
        size = sum(t.numel() * t.element_size() for t in parts.values())
        assert size <= 50 * (width + 4 * (1 + width // 64))

    def test_what_no_codec_wrote_is_refused(self):
        with pytest.raises(ProvenanceError, match="expected"):
            decode({"states": torch.zeros(2, 3)}, torch.bfloat16)
        with pytest.raises(ProvenanceError, match="nothing"):
            decode({}, torch.float32)


def manifest(**changes) -> Manifest:
    values = {
        "kind": "hidden_states", "teacher": "t", "dtype": "float64", "vocab_size": VOCAB,
        "vocabulary": "v" * 64, "max_length": 30, "overlong": "truncate", "data": ("d1", "d2"),
        "num_documents": 0, "num_tokens": 0, "codec": "exact",
    }  # fmt: skip
    return Manifest(**values | changes)


def write_cache(
    folder: Path, teacher: LiveTeacher, requests, ranks: int = 1, **changes
) -> Manifest:
    folder.mkdir()
    described = manifest(**changes)
    for rank in range(ranks):
        writer = AnswerWriter(folder, described, teacher, rank)
        for asked in requests[rank::ranks]:
            writer.add(asked)
        writer.finish()
    return join_ranks(folder, described, ranks)


class TestCache:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_exact_states_are_the_live_answers(self, folder, tmp_path, ranks, monkeypatch):
        monkeypatch.setattr("pixelrag.models.answer_writer.PART_BYTES", 20_000)
        teacher = live(folder, torch.float64)
        requests = [request(seed) for seed in range(6)]
        written = write_cache(tmp_path / "c", teacher, [*requests, requests[0]], ranks)
        assert len(written.parts) > 2
        # A document that comes twice is kept once.
        assert written.num_tokens == sum(len(asked.supervised_N) for asked in requests)
        cached = CachedTeacher(tmp_path / "c", CPU)
        for asked in requests:
            answer, expected = cached.answer(asked), teacher.answer(asked)
            # The batch and hence the order of sums may be another: equal to the last bits.
            assert error(answer.hidden_TH, expected.hidden_TH) < 1e-14
            assert torch.equal(answer.head.weight_VH, expected.head.weight_VH)
        cached.close()

    def test_documents_are_found_however_they_are_packed(self, folder, tmp_path):
        teacher, asked = live(folder, torch.float64), request()
        write_cache(tmp_path / "c", teacher, [asked])
        cached = CachedTeacher(tmp_path / "c", CPU)
        whole = cached.answer(asked).hidden_TH
        ids, bounds, done = asked.rows.input_ids_BT.flatten(), asked.rows.bounds, 0
        for start, stop in itertools.pairwise(bounds):
            mine = asked.supervised_N[(asked.supervised_N >= start) & (asked.supervised_N < stop)]
            # Alone in its row, with padding behind it.
            row = torch.cat([ids[start:stop], torch.tensor([7, 7, 7])])[None]
            answer = cached.answer(TeacherRequest(Rows.single(row), mine - start))
            assert torch.equal(answer.hidden_TH, whole[done : done + len(mine)])
            done += len(mine)
        assert done == len(whole)

    def test_top_k_is_the_teachers_distribution(self, folder, tmp_path):
        teacher, asked = live(folder, torch.float64), request()
        changes = {"kind": "top_k", "codec": "", "k": 5, "temperature": 2.0}
        write_cache(tmp_path / "c", teacher, [asked], **changes)
        answer = CachedTeacher(tmp_path / "c", CPU).answer(asked)
        assert isinstance(answer, TopK)
        full = (logits_of(teacher.answer(asked))[:, :VOCAB] / 2).log_softmax(-1).topk(5)
        assert torch.equal(answer.ids_TK, full.indices)
        assert error(answer.log_probs_TK, full.values.float()) < 1e-6
        assert bool((answer.log_probs_TK.exp().sum(-1) < 1).all())

    def test_a_batch_without_supervised_tokens(self, folder, tmp_path):
        teacher, asked = live(folder, torch.float64), request()
        write_cache(tmp_path / "c", teacher, [asked])
        empty = replace(asked, supervised_N=asked.supervised_N[:0])
        assert CachedTeacher(tmp_path / "c", CPU).answer(empty).hidden_TH.shape == (0, 72)

    def test_a_document_that_is_not_there_is_named(self, folder, tmp_path):
        teacher = live(folder, torch.float64)
        write_cache(tmp_path / "c", teacher, [request(0)])
        cached = CachedTeacher(tmp_path / "c", CPU)
        asked = request(1)
        first = asked.rows.input_ids_BT[0, :3].tolist()
        with pytest.raises(ProvenanceError, match="no answer for a document") as caught:
            cached.answer(asked)
        assert str(first)[:-1] in str(caught.value)
        # Other tokens in question, of the same document, are another answer.
        with pytest.raises(ProvenanceError, match="no answer"):
            cached.answer(replace(request(0), supervised_N=request(0).supervised_N[1:]))

    def test_keys_depend_on_what_states_depend_on(self):
        def keys(ids, supervised):
            rows = Rows.single(torch.tensor([ids]))
            asked = TeacherRequest(rows, torch.tensor(supervised))
            return [key for key, _ in document_keys(asked)]

        base = keys([1, 2, 3, 4, 5], [1, 2])
        assert keys([1, 2, 3, 9, 9], [1, 2]) == base  # after the last supervised one
        assert keys([1, 2, 9, 4, 5], [1, 2]) != base
        assert keys([9, 2, 3, 4, 5], [1, 2]) != base
        assert keys([1, 2, 3, 4, 5], [0, 2]) != base
        assert keys([1, 2, 3, 4, 5], []) == []

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"vocab_size": 499}, "vocab_size: the cache has 499, the run 500"),
            ({"vocabulary": "w" * 64}, "vocabulary: the cache has wwww"),
            ({"max_length": 31}, "max_length: the cache has 31, the run 30"),
            ({"overlong": "split"}, "overlong: the cache has split"),
            ({"kind": "top_k"}, "kind: the cache has top_k"),
            ({"data": ("d1",)}, "data: the cache has d1, the run d1, d2"),
            ({"temperature": 1.0}, "temperature: the cache has 1.0"),
        ],
    )
    def test_a_cache_of_something_else_is_refused(self, changes, expected):
        run = {
            "kind": "hidden_states", "vocab_size": VOCAB, "vocabulary": "v" * 64,
            "max_length": 30, "overlong": "truncate", "data": ("d1", "d2"), "temperature": 0.0,
        }  # fmt: skip
        manifest().check(Path("c"), run)
        manifest(data=("d0", "d2", "d1")).check(Path("c"), run)
        with pytest.raises(ProvenanceError) as caught:
            manifest(**changes).check(Path("c"), run)
        assert expected in str(caught.value)
        assert str(caught.value).count("\n") == 2

    def test_a_torn_cache_is_refused(self, folder, tmp_path):
        teacher = live(folder, torch.float64)
        with pytest.raises(ProvenanceError, match=r"no manifest\.json there"):
            CachedTeacher(tmp_path, CPU)
        write_cache(tmp_path / "c", teacher, [request()])
        path = tmp_path / "c" / MANIFEST
        content = json.loads(path.read_text())
        assert Manifest.read(tmp_path / "c").num_documents == content["num_documents"]
        for broken, match in (
            (content | {"format": 99}, "expected format 2"),
            (content | {"temperature": 3.0}, "it is altered"),
            (content | {"num_documents": 99}, "expected 99"),
            (content | {"parts": ["part-9.safetensors"]}, "part-9"),
            ({"format": 2}, "cannot be read"),
        ):
            if match in ("expected 99", "part-9"):  # signed all the same
                del broken["digest"]
                broken["digest"] = answer_cache._digest_of(broken)
            path.write_text(json.dumps(broken))
            with pytest.raises(ProvenanceError, match=match):
                CachedTeacher(tmp_path / "c", CPU)


def greeting(**changes) -> Greeting:
    values = {
        "teacher": "t", "dtype": "float64", "vocab_size": VOCAB, "vocabulary": "v",
        "codec": "exact", "isolated": True, "logit_scale": 1.0, "soft_cap": None,
    }  # fmt: skip
    return Greeting(**values | changes)


class TestChannel:
    @pytest.fixture
    def served(self, folder, tmp_path):
        servers = []

        def serve(address: str | None = None, **changes) -> TeacherServer:
            server = TeacherServer(
                live(folder, torch.float64), greeting(**changes), address or str(tmp_path / "s")
            )
            threading.Thread(target=server.serve, daemon=True).start()
            servers.append(server)
            return server

        yield serve
        for server in servers:
            server.close()

    def test_answers_are_those_of_the_live_teacher(self, folder, served):
        server, teacher = served(), live(folder, torch.float64)
        with RemoteTeacher(server.address, CPU) as remote:
            assert remote.greeting == greeting()
            for seed in range(3):
                asked = request(seed)
                answer, expected = remote.answer(asked), teacher.answer(asked)
                assert torch.equal(answer.hidden_TH, expected.hidden_TH)
                assert torch.equal(answer.head.weight_VH, expected.head.weight_VH)
            empty = replace(asked, supervised_N=asked.supervised_N[:0])
            assert remote.answer(empty).hidden_TH.shape == (0, 72)

    def test_int8_and_tcp(self, folder, served, monkeypatch):
        monkeypatch.setenv(TOKEN_VARIABLE, "a token of many letters")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server, asked = served(f"127.0.0.1:{port}", codec="int8"), request()
        with RemoteTeacher(server.address, CPU) as remote:
            got = remote.answer(asked).hidden_TH
        expected = live(folder, torch.float64).answer(asked).hidden_TH
        assert 0 < error(got, expected) < 0.01

    def test_several_ask_at_once(self, folder, served):
        server, teacher = served(), live(folder, torch.float64)
        wrong: list[int] = []

        def ask(seed: int) -> None:
            with RemoteTeacher(server.address, CPU) as remote:
                for step in range(4):
                    asked = request(10 * seed + step)
                    expected = teacher.answer(asked).hidden_TH
                    if not torch.equal(remote.answer(asked).hidden_TH, expected):
                        wrong.append(seed)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_the_socket_is_its_owners_and_goes_with_the_server(self, served):
        server = served()
        mode = stat.S_IMODE(os.stat(server.address).st_mode)
        assert mode & 0o077 == 0
        with pytest.raises(EngineError, match="cannot be listened on"):
            served(server.address)
        server.close()
        assert not Path(server.address).exists()

    def test_a_dead_servers_socket_is_replaced(self, tmp_path, served):
        path = tmp_path / "left"
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dead.bind(str(path))
        dead.close()
        with pytest.raises(EngineError, match="no teacher answers there"):
            RemoteTeacher(str(path), CPU)
        served(str(path))
        RemoteTeacher(str(path), CPU).close()

    def test_a_failing_teacher_says_why_and_goes_on(self, served, monkeypatch):
        server = served()
        with RemoteTeacher(server.address, CPU) as remote:
            asked = request()
            wrong = replace(asked, supervised_N=asked.supervised_N + 10_000)
            with pytest.raises(EngineError, match=r"teacher at .* failed: .*"):
                remote.answer(wrong)
            assert len(remote.answer(asked).hidden_TH) == len(asked.supervised_N)

    def test_a_teacher_that_hangs_up_is_named(self, tmp_path):
        address = str(tmp_path / "s")
        listener = wire.listening(address)

        def greet_and_go() -> None:
            connection, _ = listener.accept()
            with connection:
                handshake.accept(connection, b"")
                wire.receive(connection)
                wire.send(connection, {"greeting": asdict(greeting())}, {})
                wire.receive(connection)

        threading.Thread(target=greet_and_go, daemon=True).start()
        remote = RemoteTeacher(address, CPU)
        with pytest.raises(EngineError, match="hung up"):
            remote.answer(request())
        listener.close()

    def test_what_is_no_message_is_refused(self):
        for sent, match in (
            (b"\xff" * 8, "not a message"),
            (b"\x05\x00\x00\x00\x00\x00\x00\x00hello", None),
        ):
            ours, theirs = socket.socketpair()
            theirs.sendall(sent)
            theirs.close()
            with ours, pytest.raises(ValueError, match=match):
                wire.receive(ours)
        ours, theirs = socket.socketpair()
        theirs.sendall(b"\x09\x00\x00")
        theirs.close()
        with ours, pytest.raises(ConnectionError):
            wire.receive(ours)
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            assert wire.receive(ours) is None
