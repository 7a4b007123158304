package markdown

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBlocksHaveTheirLanguageWordsAndCommands(t *testing.T) {
	t.Parallel()
	blocks, err := Blocks(
		"text\n```console cluster file=a.sh\n$ one \\\n  two\nout\n$ three\n```\n```\ndrawing\n```\n```sh\n# why\n\nfour\n```\n",
	)
	require.NoError(t, err)
	require.Len(t, blocks, 3)
	require.Equal(t, "console", blocks[0].Language)
	require.Equal(t, "a.sh", blocks[0].File())
	require.True(t, blocks[0].Has("cluster"))
	require.Equal(t, []Command{{Text: "one \\\n  two\n", Output: "out\n"}, {Text: "three\n"}}, blocks[0].Commands())
	require.Equal(t, Block{Line: 8, Text: "drawing\n"}, blocks[1])
	require.Equal(t, []Command{{Text: "four\n"}}, blocks[2].Commands())
}

func TestABlockWithoutAnEndIsRefused(t *testing.T) {
	t.Parallel()
	_, err := Blocks("text\n```sh\necho\n")
	require.ErrorContains(t, err, "line 2")
	_, err = Blocks("- item\n  ```sh\n  echo\n  ```\n")
	require.ErrorContains(t, err, "line 2")
}
