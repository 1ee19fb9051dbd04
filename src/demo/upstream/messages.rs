//! Anthropic's Messages.

use serde_json::{Value, json};

use super::reply::{Reply, Step};

/// The `message` object, complete.
pub(super) fn whole(reply: &Reply) -> Value {
    let mut message = message(reply, reply.output_tokens());
    message["content"] = json!([{"type": "text", "text": reply.text()}]);
    message["stop_reason"] = stop_reason(reply).into();
    message
}

/// The named events.
pub(super) fn events(reply: &Reply, step: Step) -> String {
    match step {
        Step::Opening => {
            let block = json!({"type": "text", "text": ""});
            // Like the real one, it counts the token that it is about to send.
            event("message_start", json!({"message": message(reply, 1)}))
                + &event("content_block_start", json!({"index": 0, "content_block": block}))
                + &event("ping", json!({}))
        }
        Step::Word(index) => {
            let delta = json!({"type": "text_delta", "text": reply.piece(index)});
            event("content_block_delta", json!({"index": 0, "delta": delta}))
        }
        Step::Closing => {
            let delta = json!({"stop_reason": stop_reason(reply), "stop_sequence": null});
            let usage = usage(reply, reply.output_tokens());
            event("content_block_stop", json!({"index": 0}))
                + &event("message_delta", json!({"delta": delta, "usage": usage}))
                + &event("message_stop", json!({}))
        }
    }
}

fn event(name: &str, mut data: Value) -> String {
    data["type"] = name.into();
    format!("event: {name}\ndata: {data}\n\n")
}

fn message(reply: &Reply, output_tokens: usize) -> Value {
    json!({
        "id": format!("msg_{}", reply.id), "type": "message", "role": "assistant", "model": reply.model,
        "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage(reply, output_tokens),
    })
}

fn usage(reply: &Reply, output_tokens: usize) -> Value {
    json!({
        "input_tokens": reply.input_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    })
}

fn stop_reason(reply: &Reply) -> &'static str {
    if reply.cut { "max_tokens" } else { "end_turn" }
}
