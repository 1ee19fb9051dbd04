//! OpenAI's embeddings, far too short to be of use.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{MODEL, Refusal, reply::count};

/// Numbers in an embedding: one for every four bytes of a hash.
const DIMENSIONS: usize = 8;

/// The list of embeddings, one for each text.
pub(super) fn embed(body: &Value) -> Result<Value, Refusal> {
    let texts: Vec<&str> = match &body["input"] {
        Value::String(text) => vec![text],
        Value::Array(texts) => texts.iter().map_while(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if texts.is_empty() || body["input"].as_array().is_some_and(|sent| sent.len() != texts.len()) {
        return Err(Refusal::Malformed("`input` must be a string or a list of strings".into()));
    }
    // SDKs ask for it unless they are told otherwise, and some take nothing else then.
    let packed = body["encoding_format"] == "base64";
    let embedding = |(index, text): (usize, &&str)| {
        let vector = vector(text);
        json!({"object": "embedding", "index": index, "embedding": if packed { pack(vector) } else { json!(vector) }})
    };
    let tokens: usize = texts.iter().map(|text| count(text)).sum();
    Ok(json!({
        "object": "list",
        "data": texts.iter().enumerate().map(embedding).collect::<Vec<_>>(),
        "model": body["model"].as_str().unwrap_or(MODEL),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }))
}

/// The same text gives the same vector, of length 1.
fn vector(text: &str) -> [f32; DIMENSIONS] {
    let hash: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    let mut vector = [0.0; DIMENSIONS];
    for (number, bytes) in vector.iter_mut().zip(hash.as_chunks::<4>().0) {
        *number = i32::from_le_bytes(*bytes) as f32 / 2_f32.powi(31);
    }
    let length = vector.iter().map(|number| number * number).sum::<f32>().sqrt();
    vector.map(|number| number / length)
}

fn pack(vector: [f32; DIMENSIONS]) -> Value {
    BASE64_STANDARD.encode(vector.map(f32::to_le_bytes).as_flattened()).into()
}
