//! What the README shows is what the program understands.

use std::path::Path;

use tollgate::config;

fn toml_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```toml\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn every_toml_block_of_the_readme_is_good() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("anthropic.key"), "sk-ant-example\n").unwrap();
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let blocks = toml_blocks(&text);
    assert!(!blocks.is_empty(), "the README shows a configuration");
    for block in blocks {
        let config = config::parse(block, &folder.path().join("proxy.toml"), &|_| Some("value".to_owned()));
        config.unwrap_or_else(|problems| panic!("{problems}\n{block}"));
    }
}

#[test]
fn the_shipped_configuration_is_good_as_it_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proxy.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let config = config::parse(&text, &path, &|_| None).unwrap_or_else(|problems| panic!("{problems}"));
    assert!(matches!(config.limiter.store, config::Store::Memory));
    assert!(!config.tiers.is_empty() && !config.upstreams.is_empty());
}
