"""Servers' own metrics and cards are read, and nonsense in them is nothing."""

import pytest

from kappa_router.front.facts import LoadFacts, ModelFacts, Usage, load_in, models_in, usage_in

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 24.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 12.0
vllm:kv_offload_load_bytes_total{engine="0"} 4096.0
vllm:kv_offload_load_time_total{engine="0"} 0.5
vllm:kv_offload_load_size_count{engine="0"} 2.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:max_total_num_tokens{model_name="m"} 5000.0
sglang:prompt_tokens_total{model_name="m"} 10.0
sglang:generation_tokens_total{model_name="m"} 5.0
"""


def test_vllm_tells_its_cache_its_load_and_its_loads():
    assert load_in(VLLM) == LoadFacts(16, 1600, 3, 2, 12, 1024, 2, 4096.0, 0.5)


def test_sglang_tells_its_cache_in_tokens():
    assert load_in(SGLANG) == LoadFacts(0, 5000, 4, 1, 0, 15)


def test_sglang_tells_pages_where_it_has_no_tokens():
    pages = 'sglang:cache_config_info{page_size="64",num_pages="10"} 1.0'
    assert load_in(pages) == LoadFacts(64, 640)


TRTLLM = """\
trtllm_num_requests_running{model_name="m"} 4
trtllm_num_requests_waiting{model_name="m"} 1
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 100
"""
TRITON = """\
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 32
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m"} 7
"""


@pytest.mark.parametrize("text", [TRTLLM, TRITON])
def test_tensorrt_llm_tells_load_and_blocks(text):
    assert load_in(text) == LoadFacts(32, 3200, 4, 1)


def test_engines_of_one_server_add_up():
    second = VLLM.replace('engine="0"', 'engine="1"')
    both = load_in(VLLM + second)
    assert (both.device_tokens, both.running, both.steps) == (3200, 6, 24)
    second = second.replace("running{", 'running{a="x",').replace(" 3.0", " 5.0")
    assert load_in(VLLM + second, 0) == load_in(VLLM)
    assert load_in(VLLM + second, 1).running == 5
    assert load_in(SGLANG, 1) == load_in(SGLANG), "lines that name no rank are of all"


@pytest.mark.parametrize(
    "text",
    ["", "<html>no</html>", "vllm:num_requests_running{} NaN", "vllm:num_requests_running x",
     "vllm:num_requests_running -3", 'vllm:cache_config_info{block_size="None"} 1.0',
     "vllm:num_requests_running_extra 3"],
)  # fmt: skip
def test_metrics_of_nonsense_tell_nothing(text):
    assert load_in(text) == LoadFacts()


def test_loads_since_are_an_average_load():
    after = LoadFacts(loads=6, load_bytes=8192.0, load_s=2.5)
    assert after.loads_since(load_in(VLLM)) == (1024.0, 0.5)
    assert after.loads_since(after) is None
    assert load_in(VLLM).loads_since(after) is None  # It restarted.


def test_models_with_what_was_loaded():
    body = b'{"data":[{"id":"m","root":"/x/m","max_model_len":9},{"id":"l","parent":"m"},3]}'
    assert models_in(body) == (ModelFacts("m", "/x/m", "", 9), ModelFacts("l", "", "m"))


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"<html>", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "no list"),
     (b'{"data":"\xed\xa0\x80"}', "not JSON"),
     (b'{"data":{}}', "no list"), (b'{"data":[]}', "no list"), (b'{"data":[{"id":5}]}', "an id"),
     (b'{"data":["m"]}', "an id"), (b'{"data":[{"id":""}]}', "an id")],
)  # fmt: skip
def test_answer_without_models_is_named(body, why):
    with pytest.raises(ValueError, match=why):
        models_in(body)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}', Usage(7, 2)),
        (b'data: {"usage": {"prompt_tokens":7,"completion_tokens":2,'
         b'"prompt_tokens_details":{"cached_tokens":5}}}\n\ndata: [DONE]\n\n', Usage(7, 2, 5)),
        (b'"usage":{"prompt_tokens":7,"prompt_tokens_details":null}', Usage(7, 0)),
        (b'"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},'
         b'"output_tokens":2,"total_tokens":9}', Usage(7, 2, 3)),
        # More cached than there are tokens is a lie about the one or the other.
        (b'"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":9}}',
         Usage(7, 0, 7)),
        (b'"usage":null}\n\ndata: [DONE]', None),
        (b'"usage":{"prompt_tokens":-7}', None),
        (b'"usage":{"prompt_tokens":"7"}', None),
        (b'"usage":{"prompt_tokens":7', None),
        (b'"usage" and {"prompt_tokens":7}', None),
        (b"data: [DONE]\n\n", None),
        (b"", None),
    ],
)  # fmt: skip
def test_usage_is_read_from_the_end_of_an_answer(tail, usage):
    assert usage_in(tail) == usage
