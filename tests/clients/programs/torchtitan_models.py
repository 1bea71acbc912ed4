"""torchtitan's models, with the sizes of a checkpoint of Hugging Face: its directory is the flavor."""

from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from transformers import AutoConfig


def model_registry(flavor):
    sizes = AutoConfig.from_pretrained(flavor)
    family = {"llama": llama3, "deepseek_v3": deepseek_v3}.get(sizes.model_type, qwen3)
    spec = family.model_registry("debugmodel")
    dim, vocabulary = sizes.hidden_size, sizes.vocab_size
    heads = {"dim": dim, "n_layers": sizes.num_hidden_layers, "n_heads": sizes.num_attention_heads}
    grouped = heads | {"n_kv_heads": sizes.num_key_value_heads, "attn_backend": "flex"}
    match sizes.model_type:
        case "llama":
            rope = ComplexRoPE.Config(dim=dim // heads["n_heads"], max_seq_len=1024)
            layers = llama3._build_llama3_layers(
                **grouped, hidden_dim=sizes.intermediate_size, fuse_qkv=True, rope=rope
            )
        case "qwen3":
            head = {"head_dim": sizes.head_dim, "hidden_dim": sizes.intermediate_size}
            rope = CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=1024)
            layers = qwen3._build_qwen3_layers(**grouped, **head, fuse_qkv=True, rope=rope)
        case "qwen3_moe":
            layers = qwen3._build_qwen3_moe_layers(
                **grouped,
                head_dim=sizes.head_dim,
                moe_hidden_dim=sizes.moe_intermediate_size,
                num_experts=sizes.num_experts,
                top_k=sizes.num_experts_per_tok,
                rope=CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=1024),
                moe_comm_backend="standard",
            )
        case "deepseek_v3":
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            layers = deepseek_v3._build_dsv3_layers(
                **heads,
                **{name: getattr(sizes, name) for name in names},
                q_lora_rank=sizes.q_lora_rank or 0,
                n_dense_layers=sizes.first_k_dense_replace,
                mscale=0.7,
                dense_hidden_dim=sizes.intermediate_size,
                moe_hidden_dim=sizes.moe_intermediate_size,
                num_experts=sizes.n_routed_experts,
                num_shared_experts=sizes.n_shared_experts,
                router_top_k=sizes.num_experts_per_tok,
                router_score_func="sigmoid",
                attn_backend="flex",
                moe_comm_backend="standard",
                non_blocking_capacity_factor=None,
                rope=ComplexRoPE.Config(dim=sizes.qk_rope_head_dim, max_seq_len=1024),
            )
    spec.flavor, spec.model.dim, spec.model.vocab_size, spec.model.layers = flavor, dim, vocabulary, layers
    spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = vocabulary
    spec.model.tok_embeddings.embedding_dim = spec.model.lm_head.in_features = dim
    spec.model.norm.normalized_shape = dim
    spec.model.enable_weight_tying = sizes.tie_word_embeddings
    return spec
